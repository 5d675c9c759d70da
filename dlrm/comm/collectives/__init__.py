"""Collectives that sum a vector over all ranks: dense or sparse, flat or in two levels, plain or encoded."""

from dlrm.comm.collectives.collective import Buffers, Collective, Select, kept_in_part, select_share
from dlrm.comm.collectives.dense_sums import Ring, Tree
from dlrm.comm.collectives.levels import HiTopK, TwoLevel
from dlrm.comm.collectives.sparse import ARTopK, SparseAllGather

__all__ = [
    "ARTopK",
    "Buffers",
    "Collective",
    "HiTopK",
    "Ring",
    "Select",
    "SparseAllGather",
    "Tree",
    "TwoLevel",
    "kept_in_part",
    "select_share",
]
