"""What a training run writes: its settings, metrics, training checkpoints and finished weights."""
