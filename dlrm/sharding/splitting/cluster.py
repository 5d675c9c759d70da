"""The machines as the planner sees them: who shares a node, how fast links are, and how fast ranks work.

Nobody has to look anything up: `measure` times a few all-to-alls, lookups and copies when training starts.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from dlrm.sharding.splitting.costs import Collective

PROBE_BYTES: Final = 4_000_000
"""That a rank sends, or copies, at once to measure a bandwidth."""
PROBE_IDS: Final = 50_000
"""That a rank looks up at once to measure how long that takes."""
ROUNDS: Final = 7


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries bytes between ranks."""

    latency_s: float
    """Of an exchange of next to nothing, between all ranks."""
    bytes_per_s: float
    """Each way at once: of a rank inside its node; between nodes, of all ranks of a node together."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks in nodes of equal size, the ranks of a node one after the other."""

    num_ranks: int
    ranks_per_node: int
    inside: Link
    """Between the ranks of a node; unused where each has a node of its own."""
    between: Link
    """Between nodes; unused where there is one."""
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

    @property
    def num_nodes(self) -> int:
        """How many."""
        return self.num_ranks // self.ranks_per_node

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

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.num_ranks} ranks on {self.num_nodes} node{'s'[: self.num_nodes > 1]}"]
        if self.ranks_per_node > 1:
            parts.append(f"inside a node {_link(self.inside)}")
        if self.num_nodes > 1:
            parts.append(f"between nodes {_link(self.between)}")
        return "; ".join(parts)


def _link(link: Link) -> str:
    return f"{link.bytes_per_s * 8 / 1e9:.2g} Gb/s, {link.latency_s * 1e6:,.0f} us"


def ranks_per_node(device: torch.device) -> int:
    """From torchrun's environment, agreed by all ranks; all, without it or where nodes are not alike.

    Args:
        device: of this rank's tensors.
    """
    num_ranks = dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    least_and_most = torch.tensor([here, -here], device=device)
    dist.all_reduce(least_and_most, op=dist.ReduceOp.MIN)
    least, most = least_and_most.tolist()
    return int(least) if least == -most and num_ranks % least == 0 else num_ranks


def measure(device: torch.device) -> Cluster:
    """Time the links; all ranks call it together and get the same answer, that of the slowest.

    Args:
        device: of this rank's tensors.
    """
    num_ranks, per_node = dist.get_world_size(), ranks_per_node(device)
    rank = dist.get_rank()
    node = range(rank - rank % per_node, rank - rank % per_node + per_node)
    neighbours = [target for target in node if target != rank]
    others = [target for target in range(num_ranks) if target not in node]
    inside = _measure_link(neighbours, num_ranks, 1, device)
    between = _measure_link(others, num_ranks, per_node, device)
    return Cluster(
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        inside=inside,
        between=between,
        s_per_id=_best_time_s(_lookups(device), device) / PROBE_IDS,
        memory_bytes_per_s=PROBE_BYTES / _best_time_s(_copy(device), device),
    )


def _lookups(device: torch.device) -> Callable[[], None]:
    """What FBGEMM and `host_lookup` do besides moving rows: read by id, and bring equal ids together."""
    ids = torch.randint(PROBE_IDS, (PROBE_IDS,), dtype=torch.int32, device=device)
    rows = torch.zeros(PROBE_IDS, 4, device=device)

    def work() -> None:
        rows.index_select(0, ids)
        torch.sort(ids)
        _finish(device)

    return work


def _copy(device: torch.device) -> Callable[[], None]:
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def work() -> None:
        target.copy_(source)
        _finish(device)

    return work


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_link(targets: Sequence[int], num_ranks: int, senders: int, device: torch.device) -> Link:
    """The link to `targets`, which `senders` ranks share; of infinite speed where there are none."""
    if not targets:
        return Link(latency_s=0.0, bytes_per_s=float("inf"))
    share = PROBE_BYTES // len(targets)
    small_s = _best_time_s(_exchange(targets, 1, num_ranks, device), device)
    large_s = _best_time_s(_exchange(targets, share, num_ranks, device), device)
    sent = senders * share * len(targets)
    # where the machine is so busy that both take about as long, half of the time is the bytes'
    return Link(latency_s=small_s, bytes_per_s=sent / max(large_s - small_s, large_s / 2))


def _exchange(
    targets: Sequence[int], num_bytes: int, num_ranks: int, device: torch.device
) -> Callable[[], None]:
    splits = [num_bytes if target in targets else 0 for target in range(num_ranks)]
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def work() -> None:
        dist.all_to_all_single(received, sent, splits, splits)
        _finish(device)

    return work


def _best_time_s(work: Callable[[], None], device: torch.device) -> float:
    """Of the round in which the slowest rank was fastest: whatever else a machine does only adds to it."""
    times = torch.zeros(ROUNDS, dtype=torch.float64, device=device)
    work()  # connections and buffers are made
    for each in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times[each] = time.perf_counter() - begin
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.min())
