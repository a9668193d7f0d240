"""Evaluation: perplexity at several lengths by named protocols, and retrieval tasks."""
