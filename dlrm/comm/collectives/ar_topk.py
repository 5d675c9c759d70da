"""AR-Topk: one rank selects the indices for all ranks, so that an all-reduce can sum the values at them.

Tyagi & Swany, "Flexible communication for distributed deep learning" (arXiv 2312.02493): STAR takes ranks in
turn, VAR takes the rank whose selected values have most energy.
"""

from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import Collective, Select
from dlrm.comm.collectives.dense_sums import Ring, Tree
from dlrm.comm.collectives.point_to_point import all_gather_in_place
from dlrm.comm.collectives.sparse import INDEX_BYTES, LENGTH_BYTES, check_length, gather_lengths
from dlrm.comm.links import Links

Policy = Literal["star", "var"]
ENERGY_BYTES: Final = torch.float32.itemsize


class ARTopK(Collective):
    """Sums the values at the indices that one rank has selected.

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
