"""What tracking costs a training step. `python -m experiments.tracking`."""
