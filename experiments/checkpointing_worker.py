"""One worker of `experiments.checkpointing`; started by torchrun, not by people.

Reads its job as JSON from the command line. Rank 0 appends each measurement as a line of JSON to the job's
`out`, as soon as it is there. First comes the *memory pass*: every saver for itself, from memory that was
given back to the system, so that what it needs shows. Then a warm-up pass and the timed rounds, in which
all savers have their memory ready, as from the second save of a run on.
"""

import ctypes
import gc
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from cpr.checkpoint.checkpointer import WRITER_BYTES, Checkpointer
from cpr.checkpoint.staging import PIECE_BYTES
from cpr.shards import find_shards
from dlrm.build import start_process_group
from dlrm.inputs import Ranks
from experiments.checkpointing_job import Job, start_training
from experiments.checkpointing_savers import (
    DcpAsyncSave,
    DcpSave,
    OurRowSave,
    OurSave,
    RawWrite,
    Saver,
    TorchSave,
    checkpointer_at,
    forget_cached,
    random_rows,
    shard_bytes,
)
from experiments.training import Training

POLL_S: Final = 0.01
WARM_UP_STEPS: Final = 10
PROBED_ROWS: Final = 256
MEASURED_ALONE: Final = ("dcp save", "dcp async", "torch.save", "ours rolling", "ours consistent")
"""Savers of the memory pass."""

Measured = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the job asks for."""
    job = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    training = start_training(Job(**job["job"]), ranks)
    training.timed_steps(WARM_UP_STEPS)
    bench = Bench(Job(**job["job"]), training, Path(job["scratch"]), ranks.rank)
    out = Path(job["out"])

    def tell(key: str, measured: Measured) -> None:
        if ranks.rank == 0:
            with out.open("a") as file:
                file.write(json.dumps({"key": key, **measured}) + "\n")

    if job["memory"]:
        tell("memory", bench.memory_pass())
    if job["rounds"]:
        bench.open()
        bench.round(backwards=True)  # warms up; ours first, which keep their memory
        for number in job["rounds"]:
            tell(f"round {number}", {"round": number, **bench.round(backwards=number % 2 == 1)})
        bench.close()
    dist.destroy_process_group()
    return 0


class Watch:
    """A thread that watches one save: when it is committed, and the most memory that is taken meanwhile."""

    def __init__(self, saver: Saver) -> None:
        self.committed_at = 0.0
        self.peak_bytes = resident_bytes()
        self._saver = saver
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen_open = False
        while not self._stop.wait(POLL_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            if not self._saver.committed:
                seen_open = True
            elif seen_open and not self.committed_at:
                self.committed_at = perf_counter()


class Bench:
    """Savers and what is measured of them, on this rank.

    Args:
        job: what is trained.
        training: goes on during all measurements.
        scratch: folder for all that is saved.
        rank: of this process.
    """

    def __init__(self, job: Job, training: Training, scratch: Path, rank: int) -> None:
        self._job, self._training, self._scratch, self._rank = job, training, scratch, rank
        self._shards = find_shards(training.model)
        self._room_bytes = WRITER_BYTES + shard_bytes(self._shards) * 17 // 16 + 4 * PIECE_BYTES
        self._probes: dict[str, list[Tensor]] = {}
        self._rolling: Checkpointer | None = None
        self._consistent: Checkpointer | None = None
        model = training.model
        self._dcp = DcpSave(scratch / "dcp save", model)
        self._savers: dict[str, Saver] = {
            "dcp save": self._dcp,
            "dcp async": DcpAsyncSave(scratch / "dcp async", model),
            "torch.save": TorchSave(scratch / "torch.save", model),
            "raw": RawWrite(scratch / "raw", model),
        }

    def open(self) -> None:
        """Make our savers, which keep their memory from now on; the row save is among them."""
        self._rolling = self._checkpointer("ours rolling")
        self._consistent = self._checkpointer("ours consistent")
        rows = random_rows(self._shards, self._job.row_share, self._job.seed)
        self._savers |= {
            "ours rolling": OurSave(self._rolling, "rolling"),
            "ours consistent": OurSave(self._consistent, "consistent"),
            "ours rows": OurRowSave(self._rolling, rows),
            "ours waiting": OurSave(
                self._rolling, "consistent", waits=True
            ),  # backwards, it makes the first base
        }

    def close(self) -> None:
        """End our savers."""
        for checkpointer in (self._rolling, self._consistent):
            if checkpointer is not None:
                checkpointer.close()

    def memory_pass(self) -> Measured:
        """Each saver alone, its making and its first touch of memory included."""
        return {"savers": {name: self._alone(name) for name in MEASURED_ALONE}}

    def round(self, backwards: bool) -> Measured:
        """Every saver once, then both loads from cold and from warm files."""
        names = list(self._savers)
        saves = {}
        for name in reversed(names) if backwards else names:
            saves[name] = self._measure(name, lambda name=name: self._savers[name])  # type: ignore[misc]
            if name != "dcp save":
                self._remove(name)
        loads = {
            **self._loads("dcp", self._dcp.load, "dcp save"),
            **self._loads("ours", self._load_ours, "ours consistent"),
        }
        self._remove("dcp save")
        return {"savers": saves, "loads": loads}

    def _checkpointer(self, name: str) -> Checkpointer:
        room = self._job.ceiling_bytes if name == "ours rolling" else self._room_bytes
        return checkpointer_at(self._scratch / name, self._training.model, room)

    def _alone(self, name: str) -> Measured:
        _give_memory_back()
        made: list[Checkpointer] = []

        def make() -> Saver:
            if name in self._savers:
                return self._savers[name]
            made.append(self._checkpointer(name))
            return OurSave(made[0], name.removeprefix("ours "))

        measured = self._measure(name, make)
        for checkpointer in made:
            checkpointer.close()
        self._remove(name, also_ours=True)
        return measured

    def _measure(self, name: str, make: Callable[[], Saver]) -> Measured:
        """One save while training goes on; all times are the slowest rank's."""
        step_s = median(self._training.timed_steps(self._job.steps_before))
        before_bytes = resident_bytes()
        saver = make()
        self._probes[name] = self._probe()
        dist.barrier()
        with Watch(saver) as watch:
            began = perf_counter()
            saver.begin()
            waits_s, begun = [perf_counter() - began], perf_counter()
            steps, over = 0, bool(_across([float(saver.committed)], "min")[0])
            while not over:
                over = self._training.step(saver.committed)
                steps += 1
                waited = perf_counter()
                saver.step()
                waits_s.append(perf_counter() - waited)
            wall_s = perf_counter() - began
        num_bytes = saver.finish()
        committed_s = (watch.committed_at or begun) - began if steps else waits_s[0]
        wall_s, committed_s, extra_bytes = _across([wall_s, committed_s, watch.peak_bytes - before_bytes])
        measured = {
            "blocked_s": sum(_across(waits_s)),
            "committed_s": committed_s,
            "wall_s": wall_s,
            "steps": steps,
            "undisturbed_step_s": step_s,
            "lost_s": wall_s - steps * step_s,
            "bytes": num_bytes,
            "extra_bytes": extra_bytes,
        }
        if self._rank == 0:
            print(name, {key: round(value, 3) for key, value in measured.items()}, flush=True)
        return measured

    def _loads(self, side: str, load: Callable[[], None], folder: str) -> dict[str, float]:
        """Seconds of a load from cold and from warm files, by name.

        Raises:
            RuntimeError: what was loaded is not what was saved.
        """
        found = {}
        for state in ("cold", "warm"):
            if state == "cold" and self._rank == 0:
                forget_cached(self._scratch / folder)
            dist.barrier()
            began = perf_counter()
            load()
            found[f"{side} {state}"] = _across([perf_counter() - began])[0]
            if not all(map(torch.equal, self._probe(), self._probes[folder])):
                raise RuntimeError(f"{side} did not load what it had saved")
            self._training.step()
        return found

    def _probe(self) -> list[Tensor]:
        """Some rows of every column of every shard, to be recognized."""
        return [
            column.detach()[:: max(1, shard.num_rows // PROBED_ROWS)].clone()
            for shard in self._shards
            for column in shard.columns.values()
        ]

    def _load_ours(self) -> None:
        assert self._consistent is not None
        self._consistent.load()

    def _remove(self, name: str, *, also_ours: bool = False) -> None:
        """Delete what a rival saved, and let the disk come to rest; ours tidies its directory itself."""
        if self._rank == 0:
            if also_ours or not name.startswith("ours"):
                with suppress(FileNotFoundError):
                    shutil.rmtree(self._scratch / name)
            os.sync()
        dist.barrier()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    found: int = psutil.Process().memory_info().rss
    return found


def _give_memory_back() -> None:
    """Free memory goes to the system, so that whoever needs it next is seen to take it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _across(values: Sequence[float], how: str = "max") -> list[float]:
    """The largest, or smallest, of each value over all ranks."""
    tensor: Tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.MIN)
    return [float(value) for value in tensor.tolist()]


if __name__ == "__main__":
    raise SystemExit(main())
