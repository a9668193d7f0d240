"""config.json both ways: what its keys mean to each model type, read and written. Dicts in, dicts out."""
