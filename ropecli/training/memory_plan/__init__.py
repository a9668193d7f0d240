"""Estimates the memory, operations and time of a training step without running it."""
