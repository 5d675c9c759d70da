"""Measures what the ways to exchange dense gradients gain. `python -m experiments.communication`."""
