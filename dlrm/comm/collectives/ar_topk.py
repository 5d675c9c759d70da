"""AR-Topk: one rank chooses for all which values travel, so that an all-reduce of those alone can sum them.

Tyagi & Swany, "Flexible communication for distributed deep learning" (arXiv 2312.02493), section B.1 of our
notes: STAR takes ranks in turn, VAR the one whose selected values have most energy.
"""

from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import Collective, Select
from dlrm.comm.collectives.messages import share
from dlrm.comm.collectives.ring import Ring
from dlrm.comm.collectives.sparse import INDEX_BYTES, LENGTH_BYTES, agree_on_lengths, check_length
from dlrm.comm.collectives.tree import Tree
from dlrm.comm.links import Links

Policy = Literal["star", "var"]
ENERGY_BYTES: Final = torch.float32.itemsize


class ARTopK(Collective):
    """Sums the values at one rank's indices.

    Values that are not finite travel when a rank chooses that has them: under VAR at once, under STAR when
    its turn comes, at the latest after as many steps as there are ranks.

    Args:
        policy: who chooses.
        dense: sums the chosen values; its group and its codec are used.
        exact: all ranks select equally many. If not, they tell each other how many first.
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
        """Whose turn it is: the same on all ranks."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken, on all ranks."""
        self._step = state["step"]

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """As `Collective.sent_bytes`."""
        others = self.num_ranks - 1
        broadcast = others / self.num_ranks * num_kept * INDEX_BYTES
        return others * sum(self._small()) + broadcast + self._dense.sent_bytes(num_kept, 0)

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """As `Collective.predict_s`."""
        link, swapping = links.slowest, links.swapping
        small_s = sum(
            cost.all_gather_s(swapping.latency_s, swapping.s_per_byte, self.num_ranks, num_bytes)
            for num_bytes in self._small()
        )
        indices = num_kept * INDEX_BYTES
        broadcast_s = cost.broadcast_s(link.latency_s, link.s_per_byte, self.num_ranks, indices)
        return small_s + broadcast_s + self._dense.predict_s(links, num_kept, 0)

    def _small(self) -> list[int]:
        """Bytes of what each rank tells each other one before the source is known."""
        lengths = [] if self._exact else [LENGTH_BYTES]
        return [*lengths, ENERGY_BYTES] if self._policy == "var" else lengths

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        check_length(vector)
        indices = self._chosen(vector, select(vector))
        values = torch.index_select(vector, 0, indices, out=self._room("values", indices))
        sums = self._room("sums", indices)
        self._dense.reduce_into(sums, values, select)
        vector.index_copy_(0, indices, values)  # what the codec of the sum has left
        total.zero_()
        total.index_copy_(0, indices, sums)

    def _chosen(self, vector: Tensor, indices: Tensor) -> Tensor:
        """The indices int64 of the rank whose turn it is."""
        lengths = agree_on_lengths(indices, self._exact, self.group)
        source = self._step % self.num_ranks if self._policy == "star" else self._richest(vector, indices)
        self._step += 1
        chosen = self.buffers.take("ar.indices", lengths[source], torch.int32, vector.device)
        if source == self.rank:
            chosen.copy_(indices)
        if chosen.numel():
            dist.broadcast(chosen, group_src=source, group=self.group)
        return chosen.long()

    def _richest(self, vector: Tensor, indices: Tensor) -> int:
        """The rank with most energy at its indices; the lowest of equals, and NaN is more than anything."""
        energies = torch.zeros(self.num_ranks, device=vector.device)
        energies[self.rank] = vector.index_select(0, indices).square().sum()
        share(list(torch.split(energies, 1)), self.group)
        return int(energies.argmax())

    def _room(self, name: str, indices: Tensor) -> Tensor:
        return self.buffers.take(f"ar.{name}", indices.numel(), torch.float32, indices.device)
