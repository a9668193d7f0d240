"""The extension of a checkpoint to a length: which one, chosen on the user's texts."""
