"""Tables by the speed of workers: what one launch has measured, and what the planner of the next makes of it.

`train.batching=dynamic` gives a slow worker fewer samples. Its tables serve the samples of all workers, so
that only another plan can relieve it of them. A plan must not change while a launch restarts workers, whose
tables are in memory: speeds are stored when a launch ends with everything saved, and the next one plans by
them.
"""

import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, cast

import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import Perf, PerfModel, ShardingOption

from dlrm.launch.device import of_rank_0
from dlrm.launch.files import write_json

logger = logging.getLogger(__name__)

SPEEDS_NAME: Final = "speeds.json"
"""File in a run folder."""


def save_speeds(folder: Path, speeds: Sequence[float], local_rank: int) -> None:
    """Store the relative speeds of all workers, by rank, in a run folder; a collective.

    Raises:
        ValueError: on all ranks, if the file cannot be written.
    """
    workers = _workers(local_rank)

    def write() -> None:
        try:
            write_json(folder / SPEEDS_NAME, {"speeds": dict(zip(workers, speeds, strict=True))})
        except OSError as error:
            raise ValueError(f"the speeds of workers are not stored: {error}") from error

    of_rank_0(write)


def load_speeds(folder: Path | None, local_rank: int) -> list[float] | None:
    """Speeds of the present workers, by rank; a collective.

    None: nothing is stored, or something else, of which rank 0 warns. Training does not depend on it.
    """
    if folder is None:
        return None
    workers, file = _workers(local_rank), folder / SPEEDS_NAME
    return of_rank_0(lambda: _read(file, workers) if file.is_file() else None)


def _workers(local_rank: int) -> list[str]:
    """Names of all workers by rank: ranks may be given out anew, places in a node are not."""
    workers: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(workers, f"{platform.node()}/{local_rank}")
    return workers


def _read(file: Path, workers: Sequence[str]) -> list[float] | None:
    """Speeds of these workers; None, with a warning, if the file does not have them."""
    try:
        speeds = _parsed(file)
        if {*speeds} != {*workers}:
            raise ValueError(f"it is of other workers than these {len(workers)}")
    except (OSError, ValueError) as error:
        logger.warning("%s is not used, and tables are laid out for workers of equal speed: %s", file, error)
        return None
    return [speeds[worker] for worker in workers]


def _parsed(file: Path) -> dict[str, float]:
    try:
        speeds = {worker: float(speed) for worker, speed in json.loads(file.read_text())["speeds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it is damaged") from None
    if not all(isfinite(speed) and speed > 0 for speed in speeds.values()):
        raise ValueError("not all of its speeds are positive")
    return speeds


@dataclass(eq=False)
class _PerfAtSpeed(Perf):  # type: ignore[misc]  # TorchRec is untyped here
    """Time that a device takes for its shards, of which TorchRec's planner knows that of a common one."""

    speed: float = 1.0

    def __add__(self, other: Perf) -> "_PerfAtSpeed":
        return _PerfAtSpeed(
            fwd_compute=self.fwd_compute + other.fwd_compute / self.speed,
            fwd_comms=self.fwd_comms + other.fwd_comms / self.speed,
            bwd_compute=self.bwd_compute + other.bwd_compute / self.speed,
            bwd_comms=self.bwd_comms + other.bwd_comms / self.speed,
            input_dist_comms=self.input_dist_comms + other.input_dist_comms / self.speed,
            prefetch_compute=self.prefetch_compute + other.prefetch_compute / self.speed,
            speed=self.speed,
        )


class SpeedPerfModel(PerfModel):  # type: ignore[misc]
    """Rates a plan by its slowest rank, and has the planner's partitioner balance times instead of work.

    Args:
        topology: whose devices get their speeds.
        speeds: of ranks, relative to one another.
    """

    def __init__(self, topology: Topology, speeds: Sequence[float]) -> None:
        self._speeds = [speed * len(speeds) / sum(speeds) for speed in speeds]
        for device, speed in zip(topology.devices, self._speeds, strict=True):
            device.perf = _PerfAtSpeed(0.0, 0.0, 0.0, 0.0, speed=speed)

    def rate(self, plan: list[ShardingOption]) -> float:
        """Estimated time of the slowest rank, ms."""
        times = [0.0] * len(self._speeds)
        for option in plan:
            for shard in option.shards:
                assert shard.rank is not None, "plans are rated when all shards have a rank"
                times[shard.rank] += cast(Perf, shard.perf).total / self._speeds[shard.rank]
        return max(times)
