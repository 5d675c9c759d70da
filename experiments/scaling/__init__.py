"""What failures cost on 1 to 10,000 nodes. `python -m experiments.scaling`."""
