"""Faults of behaviour, and whether the tests catch them. `python -m benchmarks.faults` says how to use it."""
