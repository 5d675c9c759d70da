"""Measures how fast raw Criteo lines become a data set. `python -m experiments.preparation`."""
