"""Ownership of a checkpoint directory: which run may write there, as an epoch that only grows."""
