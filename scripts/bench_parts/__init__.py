"""The benchmarks of bench.py."""
