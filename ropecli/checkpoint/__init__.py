"""Checkpoints on disk and live: config dialects, reading, planning, atomic writing, proof."""
