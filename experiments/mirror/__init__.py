"""What mirrors cost a training step, and how old they are."""
