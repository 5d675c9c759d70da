"""Export: a state of a checkpoint as a full model in formats that other programs read."""
