"""What a serving engine has to be told of a checkpoint's positions: one file for each engine, found by `engine`.

Everything is said in terms of the written `rope_type`, its parameters and the window, never of a method's name, so
that a new method needs nothing here. Each engine's file names the release that was read. Loads no engine.
"""
