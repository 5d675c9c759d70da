"""The links between ranks, inside nodes and between them, measured by a few all-to-alls at the start."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

PROBE_BYTES: Final = 4_000_000
"""Bytes that a rank sends to measure a bandwidth."""
ROUNDS: Final = 7


@dataclass(frozen=True, kw_only=True)
class Link:
    """Latency and bandwidth of a network link between ranks."""

    latency_s: float
    """Seconds of an exchange of a few bytes between all ranks."""
    bytes_per_s: float
    """Bandwidth in each direction at once: per rank inside a node, per node between nodes."""

    @property
    def s_per_byte(self) -> float:
        """Seconds per byte, the papers' beta; 0 for a link that does not exist."""
        return 1.0 / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a process group whose ranks are spread evenly over nodes, in order."""

    num_ranks: int
    ranks_per_node: int
    inside: Link
    """Between the ranks of a node; unused if each rank has its own node."""
    between: Link
    """Between nodes; unused if there is one node."""

    @property
    def num_nodes(self) -> int:
        """All of one size."""
        return self.num_ranks // self.ranks_per_node

    @property
    def slowest(self) -> Link:
        """The bottleneck of a ring over all ranks, which leaves each node once."""
        return Link(
            latency_s=max(self.inside.latency_s, self.between.latency_s),
            bytes_per_s=min(self.inside.bytes_per_s, self.between.bytes_per_s),
        )

    @property
    def all_to_all(self) -> Link:
        """The link as each rank sees it while all ranks send equally much to all others."""
        others, away = self.num_ranks - 1, self.num_ranks - self.ranks_per_node
        if not others:
            return self.slowest
        busiest_s = max(
            (self.ranks_per_node - 1) * self.inside.s_per_byte,
            self.ranks_per_node * away * self.between.s_per_byte,
        )
        return Link(latency_s=self.slowest.latency_s, bytes_per_s=others / busiest_s)

    def one_rank_per_node(self) -> "Links":
        """The links of a group of one rank per node, while the nodes' other ranks use them likewise."""
        return Links(
            num_ranks=self.num_nodes,
            ranks_per_node=1,
            inside=Link(latency_s=0.0, bytes_per_s=float("inf")),
            between=Link(
                latency_s=self.between.latency_s, bytes_per_s=self.between.bytes_per_s / self.ranks_per_node
            ),
        )

    def describe(self) -> str:
        """Format the links as one line of text."""
        parts = [f"{self.num_ranks} ranks on {self.num_nodes} node{'s'[: self.num_nodes > 1]}"]
        if self.ranks_per_node > 1:
            parts.append(f"inside a node {_link(self.inside)}")
        if self.num_nodes > 1:
            parts.append(f"between nodes {_link(self.between)}")
        return "; ".join(parts)


def _link(link: Link) -> str:
    return f"{link.bytes_per_s * 8 / 1e9:.2g} Gb/s, {link.latency_s * 1e6:,.0f} us"


def ranks_per_node(device: torch.device, group: dist.ProcessGroup | None = None) -> int:
    """Read torchrun's LOCAL_WORLD_SIZE and agree on it; all ranks call it together.

    Returns:
        The number of all ranks, as of a single node, without that variable or if nodes differ in size.
    """
    num_ranks, world_size = dist.get_world_size(group), dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    # one minimum of a number and its negative shows whether it is the same everywhere
    least_and_most = torch.tensor([here, -here], device=device)
    dist.all_reduce(least_and_most, op=dist.ReduceOp.MIN, group=group)
    least, most = least_and_most.tolist()
    if least != -most or world_size % least:
        return num_ranks
    nodes = [rank // least for rank in dist.get_process_group_ranks(group)]
    per_node = nodes.count(nodes[0])
    alike = num_ranks % per_node == 0 and all(
        nodes[first : first + per_node] == [nodes[first]] * per_node
        for first in range(0, num_ranks, per_node)
    )
    return per_node if alike else num_ranks


def measure_links(device: torch.device, group: dist.ProcessGroup | None = None) -> Links:
    """Time the links; all ranks of the group call it together and get the times of the slowest."""
    num_ranks, per_node = dist.get_world_size(group), ranks_per_node(device, group)
    rank = dist.get_rank(group)
    node = range(rank - rank % per_node, rank - rank % per_node + per_node)
    neighbours = [target for target in node if target != rank]
    others = [target for target in range(num_ranks) if target not in node]
    return Links(
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        inside=_measure_link(neighbours, 1, device, group),
        between=_measure_link(others, per_node, device, group),
    )


def _measure_link(
    targets: Sequence[int], senders: int, device: torch.device, group: dist.ProcessGroup | None
) -> Link:
    """Time the link to `targets`, which `senders` ranks share; infinitely fast if there are no targets."""
    if not targets:
        return Link(latency_s=0.0, bytes_per_s=float("inf"))
    share = PROBE_BYTES // len(targets)
    small_s = best_time_s(_exchange(targets, 1, device, group), device, group)
    large_s = best_time_s(_exchange(targets, share, device, group), device, group)
    sent = senders * share * len(targets)
    # on a busy machine both may take equally long: then half of the time is counted as that of the bytes
    return Link(latency_s=small_s, bytes_per_s=sent / max(large_s - small_s, large_s / 2))


def _exchange(
    targets: Sequence[int], num_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    splits = [num_bytes if target in targets else 0 for target in range(dist.get_world_size(group))]
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    return partial(dist.all_to_all_single, received, sent, splits, splits, group=group)


def finish(device: torch.device) -> None:
    """Wait until a device has finished its queued work, so that it can be timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_time_s(
    work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Time work in several rounds and return the shortest, since other load only adds to the time.

    All ranks of the group do the work together; the seconds are those of the slowest rank, in the round in
    which they were least.
    """
    times = torch.zeros(ROUNDS, dtype=torch.float64, device=device)
    work()  # the first call makes connections and buffers
    finish(device)
    for each in range(ROUNDS):
        begin = time.perf_counter()
        work()
        finish(device)
        times[each] = time.perf_counter() - begin
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return float(times.min())
