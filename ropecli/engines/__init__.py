"""Launch commands and config files of serving engines and trainers: a table per engine, for engine_export.py.

The tables read `rope_type`, its parameters and the context length, never a method's name, so a new method needs no
change here. Each table names the engine release it was checked against. No engine is loaded.
"""
