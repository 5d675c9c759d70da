"""Ways to sum one vector over all ranks: dense or sparse, flat or in two levels, plain or encoded."""

from dlrm.comm.collectives.ar_topk import ARTopK
from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.collective import Collective, Select, keeping, share_of
from dlrm.comm.collectives.hi_topk import HiTopK
from dlrm.comm.collectives.ring import Ring
from dlrm.comm.collectives.sparse import SparseAllGather
from dlrm.comm.collectives.tree import Tree
from dlrm.comm.collectives.two_level import TwoLevel

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
    "keeping",
    "share_of",
]
