"""Other formats: a checkpoint as a whole model for other programs, and DCP directories as checkpoints."""
