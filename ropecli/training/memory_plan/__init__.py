"""Estimates what a training step takes, memory, operations and time, without running it."""
