"""What a failure cost, as the portion of lost samples (PLS), and which old worker lost how much."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Charge:
    """Samples that a worker's shards are without, and that count as lost: they cannot be lost again."""

    world_size: int
    """Of the generation whose ranks are counted."""
    rank: int
    share: float
    """Of its shards."""
    begin: int
    """Samples done at the save that the rows came from."""
    end: int
    """Samples done when they were lost."""
    generation: int = -1
    """In which the rows came from the save; memory of older ones must not come back. -1: not known."""


def losses_in(progress: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """World size, rank and generation of workers whose rows came from a save, as a run's course tells."""
    charges = (Charge(*each) for each in progress["charges"])
    return tuple((each.world_size, each.rank, each.generation) for each in charges)


def lost_workers(
    old_world_size: int, held_bytes: Mapping[int, int], whole_bytes: Mapping[int, int]
) -> dict[int, float]:
    """Which workers of the generation before lost their shards, and what share of them.

    Args:
        old_world_size: workers of that generation.
        held_bytes: what is left of a worker's shards, by its old rank; absent: nothing is.
        whole_bytes: what those shards were, for the same ranks.

    Returns:
        Share lost by old rank, above 0 and up to 1; workers that lost nothing are absent. A worker without
        shards whose memory is gone counts as any other: nobody knows what it had.
    """
    lost: dict[int, float] = {}
    for rank in range(old_world_size):
        if rank not in held_bytes:
            lost[rank] = 1.0
        elif held_bytes[rank] < whole_bytes[rank]:
            lost[rank] = 1 - held_bytes[rank] / whole_bytes[rank]
    return lost


def pls_expected(
    lost: Mapping[int, float], samples_between_saves: float | None, total_samples: int | None, world_size: int
) -> float | None:
    """What a failure at a random moment adds on average: half an interval (CPR paper).

    Args:
        lost: for each worker that lost something, by rank, the share of its shards.
        samples_between_saves: on average; None: not known.
        total_samples: of the whole run; None: not known.
        world_size: workers of the generation that failed.
    """
    if samples_between_saves is None or total_samples is None:
        return None
    return sum(lost.values()) * samples_between_saves / 2 / (total_samples * world_size)


def pls_added(
    lost: Mapping[int, float],
    samples_done: int,
    samples_saved: int,
    total_samples: int | None,
    world_size: int,
    charges: Collection[Charge] = (),
) -> float | None:
    """Portion of lost samples of one failure (CPR paper).

    Args:
        lost: for each worker that lost something, by rank, the share of its shards.
        samples_done: by the run, when the failure came.
        samples_saved: of them, those in the save that the lost rows came from.
        total_samples: of the whole run; None: not known, and so is the PLS unless nothing was lost.
        world_size: workers of the generation that failed.
        charges: of failures before, whose samples are not counted again.
    """
    if not lost:
        return 0.0
    if total_samples is None:
        return None
    assert samples_saved <= samples_done, "rows of a save are newer than the run that they are laid into"
    samples = {rank: share * (samples_done - samples_saved) for rank, share in lost.items()}
    for each in charges:
        if each.world_size == world_size and each.rank in lost:
            again = max(0, min(each.end, samples_done) - max(each.begin, samples_saved))
            samples[each.rank] -= min(each.share, lost[each.rank]) * again
    return sum(samples.values()) / (total_samples * world_size)
