"""The command line: parses options, calls the command's function, prints its result."""
