"""Text sources, tokenized documents, and training sequences."""
