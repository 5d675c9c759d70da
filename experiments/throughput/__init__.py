"""Measures how fast a training step is. `python -m experiments.throughput`."""
