"""What each worker brings to the meeting, and what follows from all offers together: a pure function."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self
from uuid import uuid4


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


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a worker brings to the meeting: plain data."""

    restarted: bool
    """It knows that it continues a run: torchrun restarted it, or `cpr run` replaced its agent."""
    host: str
    pid: int
    held: tuple[HeldSegment, ...] = ()
    """Best first."""
    launch: str = ""
    """What launched it, that no other launch shares; empty: not known."""

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
class Decision:
    """What the offers of all workers come to."""

    ranks: tuple[int, ...]
    """The new rank of each worker, in the order of the ranks that the launcher gave."""
    session_id: str
    generation: int
    """0 in the first; one more than any that left a segment of this session."""
    continues: bool
    """Whether some worker knows that this continues a run."""


def decide(offers: Sequence[Offer]) -> Decision:
    """Who gets which rank, and which session goes on.

    If nobody was restarted, this is a new run, and what earlier ones left is nobody's. Otherwise the session
    that got furthest goes on, and who holds a rank of it keeps that rank, so that tables need not move; the
    first one where two hold the same. All others fill the gaps in the launcher's order.

    Args:
        offers: of all workers, in the order of the ranks that the launcher gave.
    """
    continues = any(offer.restarted for offer in offers)
    held = [each for offer in offers for each in offer.held] if continues else []
    if not held:
        return Decision(
            ranks=tuple(range(len(offers))), session_id=uuid4().hex, generation=0, continues=continues
        )
    furthest = max(held, key=lambda each: (each.step_finished, each.generation, each.session_id))
    session_id = furthest.session_id
    return Decision(
        ranks=_ranks(offers, session_id),
        session_id=session_id,
        generation=1 + max(each.generation for each in held if each.session_id == session_id),
        continues=True,
    )


def _ranks(offers: Sequence[Offer], session_id: str) -> tuple[int, ...]:
    kept: dict[int, int] = {}  # the new rank of those who keep one
    taken: set[int] = set()
    for place, rank in _wishes(offers, session_id):
        if place not in kept and rank not in taken:
            kept[place] = rank
            taken.add(rank)
    gaps = iter(sorted(set(range(len(offers))) - taken))
    return tuple(kept[place] if place in kept else next(gaps) for place in range(len(offers)))


def _wishes(offers: Sequence[Offer], session_id: str) -> Iterator[tuple[int, int]]:
    """(place, rank that it could keep): everybody's best segment first, then everybody's second, ..."""
    for choice in range(max(len(offer.held) for offer in offers)):
        for place, offer in enumerate(offers):
            for each in offer.held[choice : choice + 1]:
                fits = each.world_size == len(offers) and 0 <= each.rank < len(offers)
                if each.session_id == session_id and fits:
                    yield place, each.rank
