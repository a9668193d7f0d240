"""Figures: one drawing function per kind of plot, legible in black and white."""
