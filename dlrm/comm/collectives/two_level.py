"""Dense sums in two levels, so that a node's link to others carries each value once, and not once a rank.

Jia et al., "Highly scalable deep learning training system" (arXiv 1807.11205), section L.2 of our notes, sum
at one rank of each node; here all ranks of a node take a share.
"""

from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.levels import Levels
from dlrm.comm.collectives.process_groups import Nodes
from dlrm.comm.collectives.ring import Ring
from dlrm.comm.compression.codecs import WireCodec


class TwoLevel(Levels):
    """An all-reduce of all values: plain inside nodes, a `Ring` between them.

    Args:
        codec: for values on the wire between nodes; inside, they are fp32.
        nodes: where ranks are.
        buffers: as for `Collective`.
    """

    is_sparse = False

    def __init__(self, codec: WireCodec, nodes: Nodes, buffers: Buffers | None = None) -> None:
        buffers = Buffers() if buffers is None else buffers
        between = Ring(codec, nodes.between, buffers) if nodes.num_nodes > 1 else None
        super().__init__(between, nodes, buffers)
        self.name = f"two levels {codec.name}"
