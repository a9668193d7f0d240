"""Perplexity at many lengths, by named protocols."""
