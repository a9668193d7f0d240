"""Numerical properties of rotary embeddings, computed from a geometry without a config or a model."""
