"""Reads and writes the RoPE settings in config.json for each model type. Works on dicts only."""
