"""Retrieval tasks: a key hidden in a long text, and whether a model finds it (`passkey`, `needle`).

templates.py the wording · haystack.py the text around the key · prompts.py keys and prompts, exact to the token ·
prompt_reader.py one pass over a prompt and what may follow it · accuracy.py lengths × depths × trials, in two modes.
"""
