"""Measures whether the host memory of training grows. `python -m experiments.memory_growth`."""
