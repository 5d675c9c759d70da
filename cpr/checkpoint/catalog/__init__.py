"""The saves of a checkpoint directory: finding, committing, compacting, verifying and deleting them."""
