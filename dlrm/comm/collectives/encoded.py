"""What sums of all values have in common: they are encoded on their way, or travel as they are."""

from typing import ClassVar

import torch.distributed as dist

from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.collective import Collective
from dlrm.comm.compression.codecs import WireCodec
from dlrm.comm.compression.packing import Packing


class EncodedSum(Collective):
    """A sum of all values of all ranks.

    Args:
        codec: for values on the wire.
        group: None is all ranks.
        buffers: as for `Collective`.
    """

    shape: ClassVar[str]
    """Of the way that values take, for `name`."""
    is_sparse = False

    def __init__(
        self, codec: WireCodec, group: dist.ProcessGroup | None = None, buffers: Buffers | None = None
    ) -> None:
        super().__init__(group, buffers)
        self._packing = Packing(codec)
        self.name = f"{self.shape} {codec.name}"
        self.is_lossless = self._packing.is_lossless
