"""Optimizers for large batches of the dense parameters, with a learning rate for each layer: LARS and LAMB.

Embedding tables are left alone: their rows keep optimizers of their own, and a shard's norm is no table's.
"""

from dlrm.optim.lamb import LAMB
from dlrm.optim.lars import LARS

__all__ = ["LAMB", "LARS"]
