"""Worker of `experiments.mirror`: trains all the time, with a mirror or without one in turn."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

from cpr.checkpoint.collectives import LONGEST_STEP, RankGroup
from cpr.mirror.config import MirrorConfig
from cpr.mirror.mirror import Mirror, start_mirror
from cpr.rendezvous import WorkerGroup, WorkerInfo
from cpr.resident.home import Home
from cpr.shards import find_shards
from dlrm.launch.device import Ranks
from experiments.checkpointing.job import TrainingJob, start_training
from experiments.harness.record import Row
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group
from experiments.mirror.run import EVERY, NONE, Rounds

WARM_UP_STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for."""
    request = job_from(arguments)
    pace = Rounds(**request["pace"])
    with worker_process_group() as ranks, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        bench = MirrorBench(TrainingJob(**request["job"]), ranks, Path(root))
        bench.training.timed_steps(WARM_UP_STEPS)
        answer_requests(ranks, lambda _: bench.rounds(pace))
    return 0


class MirrorBench:
    """One model in training, with a mirror in turn; all methods are called by all ranks.

    Args:
        job: what is trained.
        ranks: this worker and the other one, each of which stands for a node.
        root: folder of the mirrors in shared memory.
    """

    def __init__(self, job: TrainingJob, ranks: Ranks, root: Path) -> None:
        self.training = start_training(job, ranks)
        self._shards = find_shards(self.training.model, [])
        self._home, self._group = Home("mirrors", root), RankGroup(LONGEST_STEP)
        info = WorkerInfo(restarted=False, host="", pid=0)  # of local rank 0 of its node
        self._worker_group = WorkerGroup(
            store=HashStore(),
            rank=ranks.rank,
            world_size=ranks.world_size,
            session_id="mirrors",
            generation=0,
            continues=False,
            infos=(info,) * ranks.world_size,
        )

    def rounds(self, pace: Rounds) -> Row:
        """Mean seconds of a step by contender, for each round, and what mirrors of every step have cost."""
        orders, mirrors = Random(0), list[dict[str, Any]]()
        rounds = []
        for _ in range(pace.rounds):
            order = [NONE, *EVERY]
            orders.shuffle(order)
            rounds.append({name: self._step_s(name, pace, mirrors) for name in order})
        return {"rounds": rounds, "mirrors": mirrors}

    def _step_s(self, name: str, pace: Rounds, mirrors: list[dict[str, Any]]) -> float:
        if name == NONE:
            self.training.timed_steps(2)
            return mean(self.training.timed_steps(pace.steps))
        config = MirrorConfig(to="neighbour", every_steps=EVERY[name])
        mirror = start_mirror(
            config, self._worker_group, self._group, self._home, self._shards, self.training.model, []
        )
        assert mirror is not None
        while not all(self._group.gather(mirror.step_sent is not None)):  # it is filled
            self._steps(mirror, 1)
        seconds = mean(self._steps(mirror, pace.steps))
        if EVERY[name] == 1:
            mirrors.append(asdict(mirror.figures))
        self._group.gather(None)
        mirror.close(remove=True)
        return seconds

    def _steps(self, mirror: Mirror, num: int) -> list[float]:
        took_s = []
        for _ in range(num):
            took_s += self.training.timed_steps(1)
            mirror.step(self.training.steps_done, 1, {"own": {}, "counters": {}, "samples": 0})
        return took_s


if __name__ == "__main__":
    raise SystemExit(main())
