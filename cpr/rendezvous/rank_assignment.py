"""What each worker brings to the meeting, and what follows from all offers together: a pure function."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self
from uuid import uuid4

_Age = tuple[int, int]
"""Generation and last step of a segment; the greater, the newer."""


@dataclass(frozen=True, kw_only=True)
class HeldSegment:
    """Resident memory of a worker that is gone, claimed by a worker of now."""

    session_id: str
    """Of the run whose state it is."""
    rank: int
    """Its owner's, among `world_size`."""
    world_size: int
    step_finished: int
    """The last training step that its owner finished."""
    generation: int
    """Its owner's."""
    epoch: int = 0
    """Of the ownership of the checkpoint directory under which it was trained."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What a worker brings to the meeting: plain data."""

    restarted: bool
    """It knows that it continues a run: torchrun restarted it, or `cpr run` replaced its agent."""
    host: str
    pid: int
    held: tuple[HeldSegment, ...] = ()
    """Best first."""
    launch: str = ""
    """What launched it, that no other launch shares; empty: not known."""
    local_rank: int = 0
    """Its place on its node, as the launcher counts; `meet` fills this in."""
    local_world_size: int = 1
    """Workers of its node."""

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From a message.

        Raises:
            TypeError, KeyError: it is none.
        """
        return cls(**{**data, "held": tuple(HeldSegment(**each) for each in data["held"])})


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What the offers of all workers come to."""

    ranks: tuple[int, ...]
    """The new rank of each worker, in the order of the ranks that the launcher gave."""
    session_id: str
    generation: int
    """0 in the first; one more than any that left a segment of this session."""
    continues: bool
    """Whether some worker knows that this continues a run."""


def assign_ranks(infos: Sequence[WorkerInfo]) -> Assignment:
    """Who gets which rank, and which session goes on.

    If nobody was restarted, this is a new run, and what earlier ones left is nobody's. Otherwise the session
    that owned the checkpoint directory last goes on, of several the one that got furthest, and nodes that
    hold memory of it keep their ranks: tables need not move.

    Args:
        infos: of all workers, in the order of the ranks that the launcher gave.
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
    """The new rank of each worker.

    A node of n workers gets ranks kn to kn + n - 1, in the order of its local ranks: TorchRec derives devices
    and node groups from rank % n and rank // n. Where nodes differ in size, the launcher's order stays.
    """
    size = _node_size(infos)
    if size is None:
        return tuple(range(len(infos)))
    blocks = _blocks(infos, session_id, size)
    return tuple(blocks[place // size] * size + place % size for place in range(len(infos)))


def _node_size(infos: Sequence[WorkerInfo]) -> int | None:
    """Workers of each node; None if nodes are not alike, or the launcher does not count node by node."""
    size = infos[0].local_world_size
    is_even = all(
        (info.local_rank, info.local_world_size) == (place % size, size) for place, info in enumerate(infos)
    )
    return size if is_even and len(infos) % size == 0 else None


def _blocks(infos: Sequence[WorkerInfo], session_id: str, size: int) -> list[int]:
    """The block of ranks that each node gets.

    The node with the newest generation of a block's segments gets it, and of several the one with the most;
    of an old rank, only the newest memory counts. Nodes that hold nothing fill the gaps in the launcher's
    order.
    """
    holders: dict[int, list[tuple[_Age, int]]] = defaultdict(list)  # (age, node) of each old rank
    for place, info in enumerate(infos):
        for each in info.held:
            fits = each.world_size == len(infos) and 0 <= each.rank < len(infos)
            if each.session_id == session_id and fits:
                holders[each.rank].append(((each.generation, each.step_finished), place // size))
    claims: dict[tuple[int, int], set[tuple[_Age, int]]] = defaultdict(set)  # (node, block): its segments
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
    for claim in sorted(sorted(claims), key=value, reverse=True):  # between equal ones, the launcher's order
        node, block = claim
        if node not in kept and block not in taken:
            kept[node] = block
            taken.add(block)
    num_nodes = len(infos) // size
    gaps = iter(sorted(set(range(num_nodes)) - taken))
    return [kept[node] if node in kept else next(gaps) for node in range(num_nodes)]
