"""Sparse sums over all ranks: of values that each rank selects, or of those that one selects for all."""

from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import Buffers, Collective, Select, all_gather_in_place
from dlrm.comm.collectives.dense_sums import Ring, Tree
from dlrm.comm.compression.wire_codecs import WireCodec
from dlrm.comm.links import Links

INDEX_BYTES: Final = torch.int32.itemsize
LENGTH_BYTES: Final = torch.int64.itemsize
Policy = Literal["star", "var"]
ENERGY_BYTES: Final = torch.float32.itemsize


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


class ARTopK(Collective):
    """AR-Topk: one rank selects the indices for all ranks, so that an all-reduce can sum the values at them.

    Tyagi & Swany (arXiv 2312.02493): STAR takes ranks in turn, VAR the rank whose selected values have most
    energy.

    Values that are not finite are sent when the rank that has them selects: under VAR at once, under STAR
    after at most as many steps as there are ranks.

    Args:
        policy: which rank selects.
        dense: sums the selected values; its group and its codec are used.
        exact: whether all ranks select equally many values; if not, they exchange the numbers first.
    """

    is_sparse = True

    def __init__(self, policy: Policy, dense: Ring | Tree, *, exact: bool = True) -> None:
        super().__init__(dense.group, dense.buffers)
        self._policy: Final = policy
        self._dense = dense
        self._exact = exact
        self._step = 0
        self.name = f"AR-Topk {policy.upper()}, {dense.name}"

    def state_dict(self) -> dict[str, int]:
        """The step, which tells whose turn it is: the same on all ranks."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the turn of `state`, on all ranks."""
        self._step = state["step"]

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """See `Collective.sent_bytes`."""
        others = self.num_ranks - 1
        broadcast = others / self.num_ranks * num_kept * INDEX_BYTES
        return others * sum(self._header_bytes()) + broadcast + self._dense.sent_bytes(num_kept, 0)

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """See `Collective.predict_s`."""
        link, direct = links.slowest, links.all_to_all
        headers_s = sum(
            cost.all_gather_s(direct.latency_s, direct.s_per_byte, self.num_ranks, num_bytes)
            for num_bytes in self._header_bytes()
        )
        indices = num_kept * INDEX_BYTES
        broadcast_s = cost.broadcast_s(link.latency_s, link.s_per_byte, self.num_ranks, indices)
        return headers_s + broadcast_s + self._dense.predict_s(links, num_kept, 0)

    def _header_bytes(self) -> list[int]:
        """Bytes of each small all-gather before the selecting rank is known."""
        lengths = [] if self._exact else [LENGTH_BYTES]
        return [*lengths, ENERGY_BYTES] if self._policy == "var" else lengths

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        check_length(vector)
        indices = self._agreed_indices(vector, select(vector))
        values = torch.index_select(vector, 0, indices, out=self._buffer("values", indices))
        sums = self._buffer("sums", indices)
        self._dense.reduce_into(sums, values, select)
        vector.index_copy_(0, indices, values)  # the rounding errors of the codec
        total.zero_()
        total.index_copy_(0, indices, sums)

    def _agreed_indices(self, vector: Tensor, indices: Tensor) -> Tensor:
        """Broadcast the indices int64 of the rank that selects."""
        lengths = gather_lengths(indices, self._exact, self.group)
        source = self._step % self.num_ranks if self._policy == "star" else self._most_energy(vector, indices)
        self._step += 1
        chosen = self.buffers.take("ar.indices", lengths[source], torch.int32, vector.device)
        if source == self.rank:
            chosen.copy_(indices)
        if chosen.numel():
            dist.broadcast(chosen, group_src=source, group=self.group)
        return chosen.long()

    def _most_energy(self, vector: Tensor, indices: Tensor) -> int:
        """The rank with most energy at its indices; the lowest of equals, and NaN counts as the most."""
        energies = torch.zeros(self.num_ranks, device=vector.device)
        energies[self.rank] = vector.index_select(0, indices).square().sum()
        all_gather_in_place(list(torch.split(energies, 1)), self.group)
        return int(energies.argmax())

    def _buffer(self, name: str, indices: Tensor) -> Tensor:
        return self.buffers.take(f"ar.{name}", indices.numel(), torch.float32, indices.device)
