"""How fast a training step is. `python -m experiments.throughput`."""
