"""Checks and measurements of ropecli on GPUs: `scripts/gpu`."""
