"""Measures what tracking updated rows costs a training step. `python -m experiments.tracking`."""
