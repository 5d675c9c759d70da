"""The links between ranks: who shares a node, and how fast bytes travel inside nodes and between them.

Nobody has to look anything up: `measure_links` times a few all-to-alls when training starts.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

PROBE_BYTES: Final = 4_000_000
"""That a rank sends at once to measure a bandwidth."""
ROUNDS: Final = 7


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries bytes between ranks."""

    latency_s: float
    """Of an exchange of next to nothing, between all ranks."""
    bytes_per_s: float
    """Each way at once: of a rank inside its node; between nodes, of all ranks of a node together."""

    @property
    def s_per_byte(self) -> float:
        """The papers' beta; 0 of a link that does not exist."""
        return 1.0 / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Links:
    """Ranks in nodes of equal size, the ranks of a node one after the other, and what joins them."""

    num_ranks: int
    ranks_per_node: int
    inside: Link
    """Between the ranks of a node; unused where each has a node of its own."""
    between: Link
    """Between nodes; unused where there is one."""

    @property
    def num_nodes(self) -> int:
        """How many."""
        return self.num_ranks // self.ranks_per_node

    @property
    def slowest(self) -> Link:
        """What a ring of all ranks meets, which crosses each node's edge once."""
        return Link(
            latency_s=max(self.inside.latency_s, self.between.latency_s),
            bytes_per_s=min(self.inside.bytes_per_s, self.between.bytes_per_s),
        )

    @property
    def swapping(self) -> Link:
        """What a rank meets that sends as much to each other rank, while all of them do."""
        others, away = self.num_ranks - 1, self.num_ranks - self.ranks_per_node
        if not others:
            return self.slowest
        busiest_s = max(
            (self.ranks_per_node - 1) * self.inside.s_per_byte,
            self.ranks_per_node * away * self.between.s_per_byte,
        )
        return Link(latency_s=self.slowest.latency_s, bytes_per_s=others / busiest_s)

    def of_one_place(self) -> "Links":
        """What the ranks with the same place in all nodes meet, while those of other places do the same."""
        return Links(
            num_ranks=self.num_nodes,
            ranks_per_node=1,
            inside=Link(latency_s=0.0, bytes_per_s=float("inf")),
            between=Link(
                latency_s=self.between.latency_s, bytes_per_s=self.between.bytes_per_s / self.ranks_per_node
            ),
        )

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


def ranks_per_node(device: torch.device, group: dist.ProcessGroup | None = None) -> int:
    """From torchrun's environment, agreed by all ranks; all, without it or where nodes are not alike.

    Args:
        device: of this rank's tensors.
        group: whose ranks are meant; None is all.
    """
    num_ranks, world_size = dist.get_world_size(group), dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
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
    """Time the links; all ranks call it together and get the same answer, that of the slowest.

    Args:
        device: of this rank's tensors.
        group: whose ranks are meant; None is all.
    """
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
    """The link to `targets`, which `senders` ranks share; of infinite speed where there are none."""
    if not targets:
        return Link(latency_s=0.0, bytes_per_s=float("inf"))
    share = PROBE_BYTES // len(targets)
    small_s = best_time_s(_exchange(targets, 1, device, group), device, group)
    large_s = best_time_s(_exchange(targets, share, device, group), device, group)
    sent = senders * share * len(targets)
    # where the machine is so busy that both take about as long, half of the time is the bytes'
    return Link(latency_s=small_s, bytes_per_s=sent / max(large_s - small_s, large_s / 2))


def _exchange(
    targets: Sequence[int], num_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    splits = [num_bytes if target in targets else 0 for target in range(dist.get_world_size(group))]
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def work() -> None:
        dist.all_to_all_single(received, sent, splits, splits, group=group)
        finish(device)

    return work


def finish(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it, so that its time can be taken."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_time_s(
    work: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Of the round in which the slowest rank was fastest: whatever else a machine does only adds to it.

    Args:
        work: what all ranks of the group do together; it returns when it is done.
        device: of this rank's tensors.
        group: None is all ranks.
    """
    times = torch.zeros(ROUNDS, dtype=torch.float64, device=device)
    work()  # connections and buffers are made
    for each in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times[each] = time.perf_counter() - begin
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return float(times.min())
