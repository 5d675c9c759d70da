"""A sparse sum over all ranks: each rank sends its selected values and their indices to all others."""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import Buffers, Collective, Select
from dlrm.comm.collectives.point_to_point import all_gather_in_place
from dlrm.comm.compression.wire_codecs import WireCodec
from dlrm.comm.links import Links

INDEX_BYTES: Final = torch.int32.itemsize
LENGTH_BYTES: Final = torch.int64.itemsize


class SparseAllGather(Collective):
    """An all-gather of values and int32 indices, which every rank adds up in the order of ranks.

    Args:
        codec: of values on the wire.
        exact: whether all ranks select equally many values; if not, they exchange the numbers first.
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
        self._codec = codec
        self._exact = exact
        self.name = f"sparse all-gather {codec.name}"

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """See `Collective.sent_bytes`."""
        return (self.num_ranks - 1) * (self._piece_bytes(num_kept) + (0 if self._exact else LENGTH_BYTES))

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """See `Collective.predict_s`."""
        link = links.all_to_all
        pieces = [self._piece_bytes(num_kept), *([] if self._exact else [LENGTH_BYTES])]
        return sum(
            cost.all_gather_s(link.latency_s, link.s_per_byte, self.num_ranks, piece) for piece in pieces
        )

    def _piece_bytes(self, num_kept: int) -> int:
        """Length of a message of indices, followed by their values."""
        return num_kept * INDEX_BYTES + self._codec.num_bytes(num_kept)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        check_length(vector)
        indices = select(vector)
        lengths = gather_lengths(indices, self._exact, self.group)
        sizes = [self._piece_bytes(length) for length in lengths]
        pieces = self.buffers.take_messages("sparse.pieces", sizes, vector.device)
        self._fill(pieces[self.rank], vector, indices)
        all_gather_in_place(pieces, self.group)
        total.zero_()
        values = self.buffers.take("sparse.values", max(lengths), torch.float32, vector.device)
        # added in the order of ranks, own values included, so that all ranks round alike
        for piece, length in zip(pieces, lengths, strict=True):
            self._codec.unpack(piece[INDEX_BYTES * length :], values[:length])
            total.index_add_(0, piece[: INDEX_BYTES * length].view(torch.int32), values[:length])

    def _fill(self, piece: Tensor, vector: Tensor, indices: Tensor) -> None:
        """Move the values at `indices` to `piece`; their rounding errors stay in `vector`."""
        length = indices.numel()
        piece[: INDEX_BYTES * length].view(torch.int32).copy_(indices)
        values = self.buffers.take("sparse.values", length, torch.float32, vector.device)
        torch.index_select(vector, 0, indices, out=values)
        self._codec.pack(values, piece[INDEX_BYTES * length :])
        vector.index_copy_(0, indices, values)


def gather_lengths(indices: Tensor, exact: bool, group: dist.ProcessGroup | None) -> list[int]:
    """How many indices each rank of a group has selected; with `exact`, as many as this one."""
    num_ranks = dist.get_world_size(group)
    if exact:
        return [indices.numel()] * num_ranks
    lengths = torch.full((num_ranks,), indices.numel(), dtype=torch.int64, device=indices.device)
    all_gather_in_place(list(torch.split(lengths, 1)), group)
    return [int(length) for length in lengths.tolist()]


def check_length(vector: Tensor) -> None:
    """Raise a `ValueError` if int32 indices cannot address a vector."""
    if vector.numel() > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"{vector.numel():,} values are more than int32 can number; exchange them in several vectors"
        )
