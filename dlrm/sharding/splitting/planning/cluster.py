"""The machines as the planner sees them: who shares a node, how fast links are, and how fast ranks work.

Nobody has to look anything up: `measure` times a few all-to-alls, lookups and copies when training starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from dlrm.comm.links import PROBE_BYTES, Links, best_time_s, finish, measure_links
from dlrm.sharding.splitting.costs import Collective

PROBE_IDS: Final = 50_000
"""That a rank looks up at once to measure how long that takes."""


@dataclass(frozen=True, kw_only=True)
class Cluster(Links):
    """Links, and how fast the ranks that they join work."""

    s_per_id: float = 0.0
    """To look up an id and to update its row, besides moving the row itself."""
    memory_bytes_per_s: float = float("inf")
    """At which a rank goes through its own memory."""

    def time_s(self, collective: Collective) -> float:
        """Of a collective: its latencies, and the busiest link's bytes; links work at the same time."""
        link = self.between if self.num_nodes > 1 and self._crosses(collective) else self.inside
        inside, between = self._busiest(collective)
        transfer_s = max(inside / self.inside.bytes_per_s, between / self.between.bytes_per_s)
        return collective.hops * link.latency_s + transfer_s

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def _crosses(self, collective: Collective) -> bool:
        return any(
            sent and self._node(rank) != self._node(target)
            for rank, row in enumerate(collective.sent)
            for target, sent in enumerate(row)
        )

    def _busiest(self, collective: Collective) -> tuple[float, float]:
        """Bytes of the busiest rank inside its node, and of the busiest node; out or in."""
        of_ranks = [[0.0, 0.0] for _ in range(self.num_ranks)]
        of_nodes = [[0.0, 0.0] for _ in range(self.num_nodes)]
        for rank, row in enumerate(collective.sent):
            for target, sent in enumerate(row):
                if self._node(rank) == self._node(target):
                    of_ranks[rank][0] += sent
                    of_ranks[target][1] += sent
                else:
                    of_nodes[self._node(rank)][0] += sent
                    of_nodes[self._node(target)][1] += sent
        return max(map(max, of_ranks)), max(map(max, of_nodes))


def measure(device: torch.device) -> Cluster:
    """Time the links; all ranks call it together and get the same answer, that of the slowest.

    Args:
        device: of this rank's tensors.
    """
    links = measure_links(device)
    return Cluster(
        num_ranks=links.num_ranks,
        ranks_per_node=links.ranks_per_node,
        inside=links.inside,
        between=links.between,
        s_per_id=best_time_s(_lookups(device), device) / PROBE_IDS,
        memory_bytes_per_s=PROBE_BYTES / best_time_s(_copy(device), device),
    )


def _lookups(device: torch.device) -> Callable[[], None]:
    """What FBGEMM and `host_lookup` do besides moving rows: read by id, and bring equal ids together."""
    ids = torch.randint(PROBE_IDS, (PROBE_IDS,), dtype=torch.int32, device=device)
    rows = torch.zeros(PROBE_IDS, 4, device=device)

    def work() -> None:
        rows.index_select(0, ids)
        torch.sort(ids)
        finish(device)

    return work


def _copy(device: torch.device) -> Callable[[], None]:
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def work() -> None:
        target.copy_(source)
        finish(device)

    return work
