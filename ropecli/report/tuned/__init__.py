"""The kinds of plot that tell of a tuning run: a module each, with figure(reports) for a file, chart(reports) for the
terminal, of the same data.
"""
