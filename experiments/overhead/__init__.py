"""What failures cost, and what partial recovery does to quality. `python -m experiments.overhead`."""
