"""Sparse sums over all ranks: each sends the values that it selects, and where they belong, to all others."""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.collectives.collective import Collective, Select
from dlrm.comm.collectives.messages import share
from dlrm.comm.compression.codecs import WireCodec
from dlrm.comm.compression.packing import Packing
from dlrm.comm.links import Links

INDEX_BYTES: Final = torch.int32.itemsize
LENGTH_BYTES: Final = torch.int64.itemsize


class SparseAllGather(Collective):
    """An all-gather of values and int32 indices, which every rank adds up in the order of ranks.

    Args:
        codec: for values on the wire.
        exact: all ranks select equally many. If not, they tell each other how many first.
        group: None is all ranks.
        buffers: as for `Collective`.
    """

    is_sparse = True

    def __init__(
        self,
        codec: WireCodec,
        *,
        exact: bool = True,
        group: dist.ProcessGroup | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        super().__init__(group, buffers)
        self._packing = Packing(codec)
        self._exact = exact
        self.name = f"sparse all-gather {codec.name}"

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """As `Collective.sent_bytes`."""
        return (self.num_ranks - 1) * (self.piece_bytes(num_kept) + (0 if self._exact else LENGTH_BYTES))

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """As `Collective.predict_s`."""
        link = links.swapping
        pieces = [self.piece_bytes(num_kept)] if self._exact else [self.piece_bytes(num_kept), LENGTH_BYTES]
        return sum(
            cost.all_gather_s(link.latency_s, link.s_per_byte, self.num_ranks, piece) for piece in pieces
        )

    def piece_bytes(self, num_kept: int) -> int:
        """Of so many values and their indices."""
        return num_kept * INDEX_BYTES + self._packing.num_bytes(num_kept)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        check_length(vector)
        indices = select(vector)
        lengths = agree_on_lengths(indices, self._exact, self.group)
        pieces = self._pieces(lengths, vector.device)
        self._fill(pieces[self.rank], vector, indices)
        share(pieces, self.group)
        total.zero_()
        values = self.buffers.take("sparse.values", max(lengths), torch.float32, vector.device)
        for piece, length in zip(pieces, lengths, strict=True):
            self._packing.unpack(piece[INDEX_BYTES * length :], values[:length])
            total.index_add_(0, piece[: INDEX_BYTES * length].view(torch.int32), values[:length])

    def _pieces(self, lengths: list[int], device: torch.device) -> list[Tensor]:
        """Room for each rank's indices and then its values."""
        room = [INDEX_BYTES * length + self._packing.aligned_bytes(length) for length in lengths]
        memory = self.buffers.take("sparse.pieces", sum(room), torch.uint8, device)
        return [
            part[: self.piece_bytes(length)]
            for part, length in zip(torch.split(memory, room), lengths, strict=True)
        ]

    def _fill(self, piece: Tensor, vector: Tensor, indices: Tensor) -> None:
        """Move the values at `indices` out of `vector`, but for what their encoding loses."""
        length = indices.numel()
        piece[: INDEX_BYTES * length].view(torch.int32).copy_(indices)
        values = self.buffers.take("sparse.values", length, torch.float32, vector.device)
        torch.index_select(vector, 0, indices, out=values)
        self._packing.pack(values, piece[INDEX_BYTES * length :])
        vector.index_copy_(0, indices, values)


def agree_on_lengths(indices: Tensor, exact: bool, group: dist.ProcessGroup | None) -> list[int]:
    """How many indices each rank of a group has selected."""
    num_ranks = dist.get_world_size(group)
    if exact:
        return [indices.numel()] * num_ranks
    lengths = torch.full((num_ranks,), indices.numel(), dtype=torch.int64, device=indices.device)
    share(list(torch.split(lengths, 1)), group)
    return [int(length) for length in lengths.tolist()]


def check_length(vector: Tensor) -> None:
    """Indices travel as int32.

    Raises:
        ValueError: they do not fit.
    """
    if vector.numel() > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"{vector.numel():,} values are more than int32 can number; exchange them in several vectors"
        )
