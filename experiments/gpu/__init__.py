"""Whether the trainer works on this machine's GPU, and how fast. `python -m experiments.gpu`."""
