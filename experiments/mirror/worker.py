"""Worker of `experiments.mirror`: trains with a mirror or without one, in the order that it is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from typing import Any, Final

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__

from cpr.checkpoint.collectives import LONGEST_STEP, RankGroup
from cpr.mirror.config import MirrorConfig, MirrorFigures
from cpr.mirror.mirror import Mirror, start_mirror
from cpr.rendezvous import WorkerGroup, WorkerInfo
from cpr.resident.allocation import allocate_tables
from cpr.resident.home import Home
from cpr.shards import find_shards
from cpr.shards.groups import table_groups
from dlrm.launch.device import Ranks
from experiments.checkpointing.job import TrainingJob, start_training
from experiments.harness.record import Row
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group
from experiments.mirror.run import MEMORY_SHARE, MIRRORS, NONE

WARM_UP_STEPS: Final = 10
"""Before the first turn, and in a turn before its timed steps: more than the steps between two moments."""

FIRST_MOMENTS: Final = 9
"""Moments of a mirror before the first turn: it is whole, and has chosen rows for the fourth time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for."""
    request = job_from(arguments)
    with worker_process_group() as ranks:
        bench = MirrorBench(TrainingJob(**request["job"]), ranks, Path(request["memory"]))
        answer_requests(ranks, lambda asked: bench.round(asked["order"], asked["steps"]))
        bench.close()
    return 0


class MirrorBench:
    """One model in training, and its mirrors, of which at most one is at work; all ranks call all methods.

    The tables live in shared memory, as with partial recovery. The first touch of a mirror's memory takes
    seconds, and so does filling it. So all mirrors are made once, and a turn puts the hooks of its own into
    the model.

    Args:
        job: what is trained.
        ranks: this worker and the others, each of which stands for a node.
        memory: folder of tables and mirrors in shared memory.
    """

    def __init__(self, job: TrainingJob, ranks: Ranks, memory: Path) -> None:
        segment = Home("tables", memory).create(f"rank{ranks.rank}")
        with allocate_tables(segment, adopt=False):
            self._training = start_training(job, ranks)
        model = self._training.model
        shards = find_shards(model, [])
        run: dict[str, Any] = {"session_id": "mirrors", "generation": 0, "world_size": ranks.world_size}
        segment.seal(rank=ranks.rank, shards=shards, **run)
        self._training.timed_steps(WARM_UP_STEPS)
        self._group = RankGroup(LONGEST_STEP)
        self._modules = [group.emb_module for group in table_groups(model)]
        self._hooks = {NONE: self._hooks_now()}
        info = WorkerInfo(restarted=False, host="", pid=0)  # of local rank 0 of its node
        workers = WorkerGroup(
            store=HashStore(),
            rank=ranks.rank,
            continues=False,
            infos=(info,) * ranks.world_size,
            **run,
        )
        self._mirrors: dict[str, Mirror] = {}
        all_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in shards)
        limits = {"all": "", "priority": f"{MEMORY_SHARE * all_bytes:.0f}B"}
        for name, settings in MIRRORS.items():
            config, home = MirrorConfig(to="neighbour", memory=limits[name], **settings), Home(name, memory)
            steps_done = self._training.steps_done
            mirror = start_mirror(
                config, workers, self._group, home, shards, model, [], segment=segment, steps_done=steps_done
            )
            assert mirror is not None
            self._mirrors[name] = mirror
            self._hooks[name] = self._hooks_now()
            while min(self._group.gather(mirror.figures.moments)) < FIRST_MOMENTS:
                self._step(mirror)
            self._use(NONE)

    def round(self, order: Sequence[str], steps: int) -> Row:
        """What a step of each contender took (see `_turn`), by contender."""
        return {name: self._turn(name, steps) for name in order}

    def close(self) -> None:
        """End all mirrors."""
        self._group.gather(None)
        for mirror in self._mirrors.values():
            mirror.close(remove=True)

    def _turn(self, name: str, steps: int) -> Row:
        """Seconds, processor time and sent bytes of a step (means of all ranks), and the greatest age."""
        mirror = self._mirrors.get(name)
        self._use(name)
        for _ in range(WARM_UP_STEPS):
            self._step(mirror)
        ages, before = [], self._figures(mirror)
        began_s, began_cpu_s = perf_counter(), process_time()
        for _ in range(steps):
            self._step(mirror)
            ages.append(self._figures(mirror).age)
        mine = {
            "step_s": (perf_counter() - began_s) / steps,
            "cpu_s": (process_time() - began_cpu_s) / steps,
            "bytes_per_step": (self._figures(mirror).num_bytes - before.num_bytes) / steps,
            "age_steps": max(ages),
        }
        self._training.timed_steps(2)  # the last moment arrives
        all_ranks = self._group.gather(mine)
        return {
            "step_s": mean(each["step_s"] for each in all_ranks),
            "cpu_s": mean(each["cpu_s"] for each in all_ranks),
            "bytes_per_step": mean(each["bytes_per_step"] for each in all_ranks),
            "age_steps": max(each["age_steps"] for each in all_ranks),
        }

    def _step(self, mirror: Mirror | None) -> None:
        self._training.step()
        if mirror is not None:
            mirror.step(self._training.steps_done, 1, {"own": {}, "counters": {}, "samples": 0})

    @staticmethod
    def _figures(mirror: Mirror | None) -> MirrorFigures:
        return MirrorFigures() if mirror is None else mirror.figures

    def _use(self, name: str) -> None:
        """Put the hooks of a contender into the model, in the place of those that are there."""
        for module, hooks in zip(self._modules, self._hooks[name], strict=True):
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)

    def _hooks_now(self) -> list[Mapping[int, Any]]:
        return [dict(module._forward_hooks) for module in self._modules]


if __name__ == "__main__":
    raise SystemExit(main())
