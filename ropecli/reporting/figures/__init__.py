"""Every figure as a file: one drawing function for each kind of plot, legible in black and white."""
