"""Retrieval tasks (`passkey`, `needle`): whether a model finds a key hidden in a long text.

templates.py: the wording. haystack.py: the text around the key. prompts.py: keys and prompts of exact length.
prompt_reader.py: reads a prompt once for all its answers. accuracy.py: accuracy by length and depth, in two modes.
"""
