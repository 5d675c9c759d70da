"""What the ways to exchange dense gradients are worth. `python -m experiments.communication`."""
