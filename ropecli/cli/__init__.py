"""The command line: each file parses one command, calls one function, and renders what it gives."""
