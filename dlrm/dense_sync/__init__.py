"""The dense parameters, of which every rank has a replica: how their updates stay alike.

`AllReduceSync` averages gradients in each step, in any of the ways of `dlrm.comm`; `Prioritized` does so
beside the next forward pass. `Apart` lets ranks train by themselves until their gradients have changed much.
"""

from dlrm.dense_sync.allreduce import AllReduceSync
from dlrm.dense_sync.base import DenseSync

__all__ = ["AllReduceSync", "DenseSync"]
