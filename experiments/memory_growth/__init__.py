"""Whether training's host memory grows. `python -m experiments.memory_growth`."""
