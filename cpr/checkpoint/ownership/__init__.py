"""Which run may write to a checkpoint directory: ownership is an epoch that only grows."""
