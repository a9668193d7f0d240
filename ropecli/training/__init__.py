"""Full-parameter fine-tuning on sequences of the extended length."""
