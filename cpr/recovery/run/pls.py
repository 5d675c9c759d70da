"""Portion of lost samples (PLS) of a failure, as the CPR paper defines it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Charge:
    """Samples that a worker's shards have lost. They are remembered, because none can be lost twice."""

    world_size: int
    """World size of the generation whose ranks are counted."""
    rank: int
    share: float
    """Share of the worker's shards."""
    begin: int
    """Samples done at the save that the rows came from."""
    end: int
    """Samples done when the rows were lost."""
    generation: int = -1
    """Generation that loaded the rows; older memory of them must not come back. -1: unknown."""


def losses_in(progress: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """World size, rank and generation of workers whose rows came from a save, from a saved `RunProgress`."""
    charges = (Charge(*each) for each in progress["charges"])
    return tuple((each.world_size, each.rank, each.generation) for each in charges)


def lost_workers(
    old_world_size: int, held_bytes: Mapping[int, int], whole_bytes: Mapping[int, int]
) -> dict[int, float]:
    """Share of its shards that each worker of the previous generation lost, by rank; only shares above 0.

    A worker that had no shards and whose memory is gone counts as lost, because its shards are unknown.

    Args:
        old_world_size: number of workers of that generation.
        held_bytes: bytes left of a worker's shards, by old rank; absent: its memory is gone.
        whole_bytes: bytes of those shards before, for the same ranks.
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
    """PLS that a failure at a random moment adds on average: half a save interval (CPR paper).

    Args:
        lost: share of its shards that each worker lost, by rank.
        samples_between_saves: mean; None: unknown, and so is the result.
        total_samples: of the whole run; None: unknown, and so is the result.
        world_size: number of workers of the generation that failed.
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
    """PLS that one failure adds (CPR paper).

    Args:
        lost: share of its shards that each worker lost, by rank.
        samples_done: samples trained by the run until the failure.
        samples_saved: samples trained until the save that the lost rows come from.
        total_samples: of the whole run; None: unknown, and so is the result unless nothing was lost.
        world_size: number of workers of the generation that failed.
        charges: earlier losses, whose samples are not counted again.
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
