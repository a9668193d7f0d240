"""Tune a model's scaling on calibration text: method constants, gains and phases of heads, factors of rotary pairs."""
