"""HiTopK: dense inside nodes, sparse between them.

Shi et al. (MLSys 2021, arXiv 2010.10458), section A.2 of our notes. Here what a rank does not send lies in
its shard of its vector, so that the memory is that of any other collective.
"""

from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.levels import Levels
from dlrm.comm.collectives.process_groups import Nodes
from dlrm.comm.collectives.sparse import SparseAllGather
from dlrm.comm.compression.codecs import WireCodec


class HiTopK(Levels):
    """Ranks with the same shard swap what they select of its sum: a `SparseAllGather` between nodes.

    `select` is called with the shard, and should keep a share of it, as `keeping` does. Of one node, this is
    dense and lossless.

    Args:
        codec: for values on the wire between nodes; inside, they are fp32.
        nodes: where ranks are.
        exact: all ranks select equally many. If not, they tell each other how many first.
        buffers: as for `Collective`.
    """

    is_sparse = True

    def __init__(
        self, codec: WireCodec, nodes: Nodes, *, exact: bool = True, buffers: Buffers | None = None
    ) -> None:
        buffers = Buffers() if buffers is None else buffers
        between = (
            SparseAllGather(codec, exact=exact, group=nodes.between, buffers=buffers)
            if nodes.num_nodes > 1
            else None
        )
        super().__init__(between, nodes, buffers)
        self.name = f"HiTopK {codec.name}"
