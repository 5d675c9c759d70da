"""Assignment of ranks and of the session from the infos of all workers, as a pure function."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

_Age = tuple[int, int]
"""Generation and last step of a segment; greater means newer."""


@dataclass(frozen=True, kw_only=True)
class HeldSegment:
    """Resident memory of a dead worker, claimed by a live one."""

    session_id: str
    """Session of the run whose state the segment holds."""
    rank: int
    """Rank of the dead worker, among `world_size`."""
    world_size: int
    step_finished: int
    """Last training step that the dead worker finished."""
    generation: int
    """Generation of the dead worker."""
    epoch: int = 0
    """Ownership epoch of the checkpoint directory under which the state was trained."""
    is_mirror: bool = False
    """Whether it is the copy of `rank`'s rows that the dead worker kept (see `cpr.mirror`)."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Data that a worker brings to the rendezvous."""

    restarted: bool
    """Whether torchrun restarted the worker, or `cpr run` replaced its agent."""
    host: str
    pid: int
    held: tuple[HeldSegment, ...] = ()
    """Claimed memory, the best first."""
    launch: str = ""
    """Unique name of the launch; empty if not known."""
    local_rank: int = 0
    """Place on the node, as the launcher counts; set by `join`."""
    local_world_size: int = 1
    """Workers on the node; set by `join`."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """An info from a message.

        Raises:
            TypeError, KeyError: the data are not an info.
        """
        return cls(**{**data, "held": tuple(HeldSegment(**each) for each in data["held"])})


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Ranks and session of all workers."""

    ranks: tuple[int, ...]
    """New rank of each worker, in the order of the launcher's ranks."""
    session_id: str
    generation: int
    """0 for a new session; otherwise one more than the newest that left a segment of this session."""
    continues: bool
    """Whether any worker was restarted."""


def assign_ranks(infos: Sequence[WorkerInfo]) -> Assignment:
    """Assign ranks, and decide which session continues.

    If no worker was restarted, this is a new run, and memory of earlier runs is ignored. Otherwise the
    session that last owned the checkpoint directory continues, among several the one with the most steps, and
    nodes that hold its memory keep their ranks, so that tables need not move.

    Args:
        infos: in the order of the launcher's ranks.
    """
    continues = any(info.restarted for info in infos)
    held = [each for info in infos for each in info.held] if continues else []
    if not held:
        return Assignment(
            ranks=tuple(range(len(infos))), session_id=uuid4().hex, generation=0, continues=continues
        )
    furthest = max(held, key=lambda each: (each.epoch, each.step_finished, each.generation, each.session_id))
    session_id = furthest.session_id
    return Assignment(
        ranks=_ranks(infos, session_id),
        session_id=session_id,
        generation=1 + max(each.generation for each in held if each.session_id == session_id),
        continues=True,
    )


def _ranks(infos: Sequence[WorkerInfo], session_id: str) -> tuple[int, ...]:
    """New rank of each worker.

    A node of n workers gets ranks kn to kn + n - 1, in the order of its local ranks, as TorchRec derives
    devices and node groups from rank % n and rank // n. If nodes differ in size, the launcher's ranks stay.
    """
    size = _node_size(infos)
    if size is None:
        return tuple(range(len(infos)))
    blocks = _blocks(infos, session_id, size)
    return tuple(blocks[place // size] * size + place % size for place in range(len(infos)))


def _node_size(infos: Sequence[WorkerInfo]) -> int | None:
    """Workers per node; None if nodes differ in size, or the launcher does not count node by node."""
    size = infos[0].local_world_size
    is_even = all(
        (info.local_rank, info.local_world_size) == (place % size, size) for place, info in enumerate(infos)
    )
    return size if is_even and len(infos) % size == 0 else None


def _blocks(infos: Sequence[WorkerInfo], session_id: str, size: int) -> list[int]:
    """Block of ranks of each node.

    A block goes to the node with the newest generation of its segments, among several to the one with the
    most segments; only the newest memory of an old rank counts. The other nodes fill the gaps in the
    launcher's order.
    """
    holders: dict[int, list[tuple[_Age, int]]] = defaultdict(list)  # (age, node) of each old rank
    for place, info in enumerate(infos):
        for each in info.held:
            fits = each.world_size == len(infos) and 0 <= each.rank < len(infos)
            if each.session_id == session_id and fits and not each.is_mirror:
                holders[each.rank].append(((each.generation, each.step_finished), place // size))
    # memory that another node has of the same rank in a newer version is useless: it makes no claim
    claims: dict[tuple[int, int], set[tuple[_Age, int]]] = defaultdict(set)  # segments of (node, block)
    for rank, found in holders.items():
        newest, _ = max(found)
        for age, node in found:
            if age == newest:
                claims[node, rank // size].add((age, rank))

    def value(claim: tuple[int, int]) -> tuple[int, int, _Age]:
        newest, _ = max(claims[claim])
        return newest[0], len(claims[claim]), newest

    kept: dict[int, int] = {}
    taken: set[int] = set()
    for claim in sorted(sorted(claims), key=value, reverse=True):  # ties: the launcher's order
        node, block = claim
        if node not in kept and block not in taken:
            kept[node] = block
            taken.add(block)
    num_nodes = len(infos) // size
    gaps = iter(sorted(set(range(num_nodes)) - taken))
    return [kept[node] if node in kept else next(gaps) for node in range(num_nodes)]
