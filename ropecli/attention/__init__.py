"""The attention that the relative-position methods share; torch, and no method, config or model."""
