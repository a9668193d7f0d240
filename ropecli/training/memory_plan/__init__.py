"""What a training step takes: memory, operations, time; found without making it."""
