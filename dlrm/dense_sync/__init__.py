"""Synchronization of the dense parameters, of which every rank has a replica.

`AllReduceSync` averages gradients in each step, by any exchange of `dlrm.comm`; `P3Sync` does so in the
background of the next forward pass; `SelectiveSync` averages parameters when gradients have changed much;
`DelayedSync` averages gradients in the background of the next step, which applies them.
"""

from dlrm.dense_sync.allreduce import AllReduceSync
from dlrm.dense_sync.base import DenseSync

__all__ = ["AllReduceSync", "DenseSync"]
