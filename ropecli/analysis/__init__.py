"""What rotary embeddings do, in numbers worked out from a geometry. Knows no config and no model."""
