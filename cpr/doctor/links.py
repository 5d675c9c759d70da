"""Bandwidth, latency and clock skew of every link, measured with what training uses."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from cpr.doctor.finding import Finding, problem, warning
from cpr.doctor.meeting import Meeting
from cpr.humanize import duration_text

PINGS: Final = 20
TRANSFER_BYTES: Final = 32 * 2**20
LEAST_GBPS: Final = 1.0
SLOW_SHARE: Final = 0.5
"""A link is slow below this share of the median bandwidth."""
MOST_LATENCY_S: Final = 0.005
MOST_SKEW_S: Final = 1.0
BAD_SKEW_S: Final = 300.0
"""Object stores refuse requests of clocks that are 5 to 15 minutes wrong."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Measurement of a link, by one of its two nodes."""

    gbps: tuple[float, float]
    """Bandwidth to the other node and back, of one transfer at a time."""
    latency_s: float
    """Shortest round trip of a number."""
    skew_s: float
    """How far the other node's clock is ahead."""


def rounds(num_nodes: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of nodes, in rounds in which each node is in one pair at most.

    >>> list(rounds(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    order = list(range(num_nodes + num_nodes % 2))
    for _ in order[1:]:
        pairs = zip(order[: len(order) // 2], reversed(order), strict=False)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes]
        order = [order[0], order[-1], *order[1:-1]]


def check_links(meeting: Meeting) -> Iterator[Finding]:
    """Measure all links over the default process group, and judge those to nodes of higher ranks.

    Raises:
        RuntimeError: a transfer failed; names the other node if it was one of this node's.
    """
    own = {}
    for pairs in rounds(len(meeting.hosts)):
        dist.barrier()
        for pair in pairs:
            if meeting.rank in pair:
                peer = sum(pair) - meeting.rank
                try:
                    own[pair] = _measure(peer, is_first=meeting.rank == pair[0])
                except RuntimeError as error:
                    raise RuntimeError(f"to {meeting.name(peer)}: {error}") from error
    gathered: list[dict[tuple[int, int], Link]] = [{} for _ in meeting.hosts]
    dist.all_gather_object(gathered, {pair: link for pair, link in own.items() if pair[0] == meeting.rank})
    links = {pair: link for each in gathered for pair, link in each.items()}
    yield from judge_links(links, meeting.hosts, meeting.rank)


def _measure(peer: int, is_first: bool) -> Link:
    clock, data = torch.zeros(1, dtype=torch.float64), torch.zeros(TRANSFER_BYTES, dtype=torch.uint8)

    def exchange(there: torch.Tensor, back: torch.Tensor) -> float:
        """Send from the first node to the second and back; returns seconds."""
        began = time.perf_counter()
        if is_first:
            dist.send(there, peer)
            dist.recv(back, peer)
        else:
            dist.recv(there, peer)
            clock.fill_(time.time())
            dist.send(back, peer)
        return time.perf_counter() - began

    pings = []
    for _ in range(PINGS):
        wall_s, took_s = time.time(), exchange(clock, clock)
        pings.append((took_s, float(clock) - wall_s - took_s / 2))
    latency_s, skew_s = min(pings)
    bits = 8e-9 * TRANSFER_BYTES
    gbps = bits / exchange(data, clock), bits / exchange(clock, data)
    return Link(gbps=gbps, latency_s=latency_s, skew_s=skew_s)


def judge_links(links: dict[tuple[int, int], Link], hosts: Sequence[str], rank: int) -> list[Finding]:
    """Judge the links of node `rank` to higher ones by limits, and by the median bandwidth of all links."""
    median = statistics.median(gbps for link in links.values() for gbps in link.gbps)
    return [
        _judge(f"link to {hosts[pair[1]]} (node {pair[1]})", link, median)
        for pair, link in sorted(links.items())
        if pair[0] == rank
    ]


def _judge(name: str, link: Link, median_gbps: float) -> Finding:
    text = (
        f"{link.gbps[0]:.3g} Gb/s there, {link.gbps[1]:.3g} back (median of all links {median_gbps:.3g}), "
        f"{duration_text(link.latency_s)} round trip, its clock {link.skew_s:+.3f} s"
    )
    advice = []
    if abs(link.skew_s) > MOST_SKEW_S:
        advice.append(
            "set the clocks by NTP (chrony), as object stores refuse wrong ones and times in logs mislead"
        )
    if min(link.gbps) < max(LEAST_GBPS, SLOW_SHARE * median_gbps):
        advice.append("look at MTU, duplex and other traffic, or choose another interface")
    if link.latency_s > MOST_LATENCY_S:
        advice.append("place the nodes closer, as every step waits for several round trips")
    if not advice:
        return Finding(name, text)
    return (problem if abs(link.skew_s) > BAD_SKEW_S else warning)(name, text, "; ".join(advice))
