"""Sources of text, and what becomes of them: documents of tokens, and sequences to train on."""
