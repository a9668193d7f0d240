"""Retrieval tasks (`passkey`, `needle`): whether a model finds a key hidden in a long text.

templates.py: the wording. haystack.py: the text around the key. prompts.py: keys and prompts of exact length.
"""
