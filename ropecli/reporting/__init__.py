"""Tables and plots, made from reports alone."""
