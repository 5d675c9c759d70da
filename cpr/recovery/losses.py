"""What a failure cost, as the portion of lost samples (PLS), and which old worker lost how much."""

from collections.abc import Mapping, Sequence


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


def pls_added(
    lost: Sequence[float], samples_done: int, samples_saved: int, total_samples: int | None, world_size: int
) -> float | None:
    """Portion of lost samples of one failure (CPR paper, section 4.1).

    Args:
        lost: for each worker that lost something, the share of its shards.
        samples_done: by the run, when the failure came.
        samples_saved: of them, those in the save that the lost rows came from.
        total_samples: of the whole run; None: not known, and so is the PLS unless nothing was lost.
        world_size: workers of the generation that failed.
    """
    if not lost:
        return 0.0
    if total_samples is None:
        return None
    return sum(lost) * max(0, samples_done - samples_saved) / (total_samples * world_size)
