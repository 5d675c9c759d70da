"""The machines as the planner sees them: nodes, speed of links, and speed of ranks.

`measure` times a few all-to-alls, lookups and copies when training starts, so that users configure nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from dlrm.comm.links import PROBE_BYTES, Links, best_time_s, finish, measure_links
from dlrm.sharding.splitting.costs import CollectiveBytes

PROBE_IDS: Final = 50_000
"""Number of ids that a rank looks up at once to measure the time of a lookup."""


@dataclass(frozen=True, kw_only=True)
class Cluster(Links):
    """Speeds of the links and of the ranks that they connect."""

    s_per_id: float = 0.0
    """Seconds to look up an id and update its row, besides moving the row itself."""
    memory_bytes_per_s: float = float("inf")
    """Bandwidth of a rank's own memory."""

    def time_s(self, collective: CollectiveBytes) -> float:
        """Estimated time of a collective.

        Latencies, and the bytes of the busiest link; links work in parallel.
        """
        link = self.between if self.num_nodes > 1 and self._crosses(collective) else self.inside
        inside, between = self._busiest(collective)
        transfer_s = max(inside / self.inside.bytes_per_s, between / self.between.bytes_per_s)
        return collective.hops * link.latency_s + transfer_s

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def _crosses(self, collective: CollectiveBytes) -> bool:
        return any(
            sent and self._node(rank) != self._node(target)
            for rank, row in enumerate(collective.sent)
            for target, sent in enumerate(row)
        )

    def _busiest(self, collective: CollectiveBytes) -> tuple[float, float]:
        """Bytes of the busiest rank inside its node, and of the busiest node, in the larger direction."""
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
    """Time links and ranks; a collective with the same result on all ranks, that of the slowest."""
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
    """Work of FBGEMM and `host_lookup` besides moving rows: reading by id, and grouping equal ids."""
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
