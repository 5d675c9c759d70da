"""Compares every model with its counterpart in a public library. `python -m experiments.models`."""
