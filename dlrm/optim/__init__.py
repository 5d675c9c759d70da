"""Optimizers and learning rate schedules, among them LARS and LAMB for large batches of dense parameters.

LARS and LAMB do not update embedding tables: a shard's norm is not that of its table.
"""

from dlrm.optim.layerwise import LAMB, LARS

__all__ = ["LAMB", "LARS"]
