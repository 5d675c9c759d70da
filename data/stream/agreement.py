"""What ranks agree on before each step: whether to train, and how many records of each rank.

Each rank offers records that have come to it. All ranks see all offers and decide by them alone, so that they
decide the same. The sizes of batches follow the rates at which records arrive (ScaDLES, arXiv 2301.08897),
within one global batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from data.stream.backlog import Stretch, Stretches
from data.stream.source import START, FoundUnit, Place


@dataclass(frozen=True, kw_only=True)
class PartitionState:
    """How far a partition has been trained; what the position of a stream consists of."""

    place: Place = START
    """Of the next record."""
    stretches: Stretches = ()
    """What is left out of the records from there on."""
    trained: int = 0
    left_out: int = 0
    """Records that the limit on waiting ones has left out."""
    bad: int = 0
    """Records that could not be read."""

    def to_json(self) -> list[object]:
        """As plain values."""
        stretches = [list(each) for each in self.stretches]
        return [*self.place, stretches, self.trained, self.left_out, self.bad]

    @classmethod
    def from_json(cls, values: Sequence[object]) -> "PartitionState":
        """From what `to_json` gave; one version gave a value more, which is not needed."""
        unit, record, stretches, trained, left_out, bad = values[:6]
        return cls(
            place=Place(unit, record),  # type: ignore[arg-type]
            stretches=tuple(Stretch(*each) for each in stretches),  # type: ignore[attr-defined]
            trained=trained,  # type: ignore[arg-type]
            left_out=left_out,  # type: ignore[arg-type]
            bad=bad,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a rank could train in the next step."""

    size: int
    """Records that it would train."""
    waiting: int
    """Records that have come to its partitions, these and others."""
    waited_s: float
    """Seconds since the first of the offered records was read; 0 without any."""
    idle_s: float
    """Seconds since the newest record was read."""
    lag_s: float
    """Age of the first of the offered records; 0 without any."""
    has_looked: bool = True
    """Whether it knows what waits; until all do, none is trained, as batches follow what waits."""
    states: Mapping[str, PartitionState] = field(default_factory=dict)
    """Of partitions that change by the step, after it."""
    found: Mapping[str, Sequence[FoundUnit]] = field(default_factory=dict)
    """Units that have come to partitions since the offer before."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a step begins and the stream ends.

    Attributes:
        global_batch: records of a step, over all ranks; at least one a rank.
        wait_s: a step with fewer records begins when one has waited this long.
        end_after_s: the stream ends when nothing has come for this long; None: never.
    """

    global_batch: int
    wait_s: float
    end_after_s: float | None


def decide(offers: Sequence[Offer], rules: Rules) -> Literal["train", "wait", "end"]:
    """Decide by the offers of all ranks."""
    if not all(offer.has_looked for offer in offers):
        return "wait"
    total = sum(offer.size for offer in offers)
    if total >= rules.global_batch or (total and max(offer.waited_s for offer in offers) >= rules.wait_s):
        return "train"
    is_over = rules.end_after_s is not None and not total and not any(offer.waiting for offer in offers)
    if is_over and min(offer.idle_s for offer in offers) >= (rules.end_after_s or 0.0):
        return "end"
    return "wait"


def limits(offers: Sequence[Offer], global_batch: int) -> list[int]:
    """Records that each rank may offer next; together one global batch.

    Every rank may offer one, and the others are in proportion to what waits; equal if nothing does. None may
    offer any before all know what waits.
    """
    if not all(offer.has_looked for offer in offers):
        return [0] * len(offers)
    waiting = [offer.waiting for offer in offers]
    spare = global_batch - len(offers)
    total = sum(waiting)
    shares = [spare * each / total for each in waiting] if total else [spare / len(offers)] * len(offers)
    whole = [int(share) for share in shares]
    by_rest = sorted(range(len(offers)), key=lambda rank: (whole[rank] - shares[rank], rank))
    for rank in by_rest[: spare - sum(whole)]:
        whole[rank] += 1
    return [1 + each for each in whole]
