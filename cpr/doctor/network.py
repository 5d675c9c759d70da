"""Checks between nodes: they meet as workers do, and time every link with what training uses."""

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from cpr.doctor.finding import Finding, problem, warning
from cpr.errors import RendezvousError
from cpr.humanize import duration_text
from cpr.rendezvous.join import init_process_group, join_from
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.rank_assignment import WorkerInfo

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


def network_findings(env: LauncherEnv, timeout: timedelta) -> list[Finding]:
    """Meet the other nodes, measure all links, and judge those to nodes of higher ranks.

    Args:
        env: of one process for each node; rank 0 hosts the store.
        timeout: for the others to come, and for each transfer.
    """
    name = socket.gethostname()
    try:
        own = env.own_address()
        group = join_from(env, WorkerInfo(restarted=False, host=name, pid=os.getpid()), timeout)
    except ValueError as error:
        return [problem("rendezvous", f"no route to {env.address}: {error.__cause__}", "correct --rdzv")]
    except (RendezvousError, OSError) as error:
        advice = (
            f"run `cpr doctor` on all {env.world_size} nodes at the same time, with --node-rank 0 on "
            f"{env.address}; open port {env.port} in its firewall, and end another program that has it"
        )
        return [problem("rendezvous", str(error), advice)]
    found = [Finding("rendezvous", f"{env.world_size} nodes at {env.address}:{env.port}; this is {own.name}")]
    try:
        init_process_group(group, "gloo", timeout)
        links = _measure_all(env.rank, env.world_size)
        found += [*judge_links(links, [info.host for info in group.infos], env.rank), *_try_nccl()]
        dist.barrier()  # rank 0 hosts the store
    except RuntimeError as error:
        advice = (
            "open all ports between the nodes, and name the interface of the job's network in "
            f"GLOO_SOCKET_IFNAME: the one that has {own.name} (`ip -br addr`), as gloo takes the one that "
            f"{name} resolves to"
        )
        found.append(problem("links", str(error).split("\n", maxsplit=1)[0], advice))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


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


def _measure_all(rank: int, num_nodes: int) -> dict[tuple[int, int], Link]:
    """Links of all pairs of nodes; the same result on all nodes."""
    own = {}
    for pairs in rounds(num_nodes):
        dist.barrier()
        for pair in pairs:
            if rank in pair:
                own[pair] = _measure(peer=sum(pair) - rank, is_first=rank == pair[0])
    gathered: list[dict[tuple[int, int], Link]] = [{}] * num_nodes
    dist.all_gather_object(gathered, {pair: link for pair, link in own.items() if pair[0] == rank})
    return {pair: link for each in gathered for pair, link in each.items()}


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
    if abs(link.skew_s) > BAD_SKEW_S:
        return problem(name, text, "set the clocks by NTP (chrony): object stores refuse wrong ones")
    if abs(link.skew_s) > MOST_SKEW_S:
        return warning(name, text, "set the clocks by NTP (chrony), so that times in logs can be compared")
    if min(link.gbps) < max(LEAST_GBPS, SLOW_SHARE * median_gbps):
        return warning(name, text, "look at MTU, duplex and other traffic, or choose another interface")
    if link.latency_s > MOST_LATENCY_S:
        return warning(name, text, "place the nodes closer: every step waits for several round trips")
    return Finding(name, text)


def _try_nccl() -> list[Finding]:
    """Sum a number over the first GPUs of all nodes; nothing if a node has none."""
    num_gpus = torch.tensor(torch.cuda.device_count())
    dist.all_reduce(num_gpus, dist.ReduceOp.MIN)
    if not num_gpus:
        return []
    total = torch.ones(1, device="cuda")
    try:
        dist.all_reduce(total, group=dist.new_group(backend="nccl"))
    except RuntimeError as error:
        advice = "run with NCCL_DEBUG=INFO, and choose the network by NCCL_SOCKET_IFNAME"
        return [problem("NCCL", str(error).split("\n", maxsplit=1)[0], advice)]
    return [Finding("NCCL", f"sums over {int(total)} nodes")]
