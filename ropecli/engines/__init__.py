"""What serving engines must be told of a checkpoint's positions: a table per engine, rendered by engine_export.py.

The tables work from the written `rope_type`, its parameters and the context length, never from a method's name, so
that a new method needs nothing here. Each names the release that was read. No engine is loaded.
"""
