"""Measures all savers of `experiments.checkpointing` on one rank during training."""

import gc
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.config import WRITER_BYTES
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.save.staging import PIECE_BYTES
from cpr.shards import find_shards
from experiments.checkpointing.baselines import (
    DcpAsyncSave,
    DcpSave,
    RawWrite,
    Saver,
    TorchSave,
    forget_cached,
)
from experiments.checkpointing.job import TrainingJob
from experiments.checkpointing.ours import OurRowSave, OurSave, checkpointer_at, random_rows, shard_bytes
from experiments.harness.training import Training

PROBED_ROWS: Final = 256
MOST_WARM_UPS: Final = 3
MEASURED_ALONE: Final = ("dcp save", "dcp async", "torch.save", "ours rolling", "ours consistent")
"""Savers of the memory pass."""

Measured = dict[str, Any]


class Bench:
    """The savers of this rank and their measurements.

    Args:
        job: the model that is trained and saved.
        training: continues during all measurements.
        scratch: folder for all saves.
        rank: of this process.
    """

    def __init__(self, job: TrainingJob, training: Training, scratch: Path, rank: int) -> None:
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

    def _open(self) -> None:
        """Make the savers of CPR, which keep their memory until `close`."""
        rolling, consistent = self._scratch / "ours rolling", self._scratch / "ours consistent"
        self._rolling = self._checkpointer(rolling)
        self._consistent = self._checkpointer(consistent)
        rows = random_rows(self._shards, self._job.row_share, self._job.seed)
        self._savers |= {
            "ours rolling": OurSave(rolling, self._rolling, "rolling"),
            "ours consistent": OurSave(consistent, self._consistent, "consistent"),
            "ours rows": OurRowSave(rolling, self._rolling, rows),
            # in a reversed round, this one writes the full save that the row save needs
            "ours waiting": OurSave(rolling, self._rolling, "consistent", waits=True),
        }

    def close(self) -> None:
        """Close the savers of CPR."""
        for checkpointer in (self._rolling, self._consistent):
            if checkpointer is not None:
                checkpointer.close()

    def memory_pass(self) -> Measured:
        """Measure each saver alone, its construction and its first use of memory included."""
        return {"savers": {name: self._alone(name) for name in MEASURED_ALONE}}

    def warm_up(self) -> None:
        """Run every saver once, so that its memory is warm later; DCP until it takes no new memory.

        DCP needs blocks of more than a gigabyte, for which the freed memory of others may be too fragmented.
        """
        if self._rolling is not None:
            return  # it is warm
        self._open()
        self.round(backwards=True)  # CPR first, so that its buffers do not fragment the memory that DCP frees
        little_bytes = across([shard_bytes(self._shards)])[0] / 16
        for name in ("dcp save", "dcp async"):
            for _ in range(MOST_WARM_UPS):
                measured = self.measure(name, partial(self._savers.__getitem__, name))
                self._remove(name)
                if measured["extra_bytes"] < little_bytes:  # both are the same on all ranks
                    break

    def round(self, backwards: bool) -> Measured:
        """Measure every saver once, then both loads from cold and from warm files."""
        names = list(self._savers)
        saves = {}
        for name in reversed(names) if backwards else names:
            saves[name] = self.measure(name, partial(self._savers.__getitem__, name))
            if name != "dcp save":
                self._remove(name)
        loads: dict[str, float] = {}
        sides = [("dcp", self._dcp.load, "dcp save"), ("ours", self._load_ours, "ours consistent")]
        for side, load, name in reversed(sides) if backwards else sides:
            loads |= self._loads(side, load, name)
        self._remove("dcp save")
        return {"savers": saves, "loads": loads}

    def _checkpointer(self, folder: Path) -> Checkpointer:
        room = self._job.ceiling_bytes if folder.name == "ours rolling" else self._room_bytes
        return checkpointer_at(folder, self._training.model, room)

    def _alone(self, name: str) -> Measured:
        give_memory_back()
        made: list[Checkpointer] = []

        def make() -> Saver:
            if name in self._savers:
                return self._savers[name]
            made.append(self._checkpointer(self._scratch / name))
            moment: Moment = "rolling" if name == "ours rolling" else "consistent"
            return OurSave(self._scratch / name, made[0], moment)

        measured = self.measure(name, make)
        for checkpointer in made:
            checkpointer.close()
        self._remove(name, also_ours=True)
        return measured

    def measure(self, name: str, make: Callable[[], Saver]) -> Measured:
        """Measure one save during training by what `make` makes; all times are those of the slowest rank."""
        undisturbed_s = self._training.timed_steps(self._job.steps_before)
        before_bytes = resident_bytes()
        saver = make()
        self._probes[name] = self._probe()
        dist.barrier()
        with SaveWatch(saver) as watch:
            began = perf_counter()
            saver.begin()
            begun = perf_counter()
            waits_s = [begun - began, *self._train_until(lambda: saver.committed, saver)]
            wall_s = perf_counter() - began
            waits_after_s = self._train_until(lambda: saver.idle, saver)
            after_s = perf_counter() - began - wall_s
        num_bytes = saver.finish()
        step_s = median([*undisturbed_s, *self._training.timed_steps(self._job.steps_before)])
        steps, steps_after = len(waits_s) - 1, len(waits_after_s)
        committed_s = (watch.committed_at or begun) - began if steps else waits_s[0]
        slowest = across([wall_s, after_s, committed_s, watch.peak_bytes - before_bytes])
        wall_s, after_s, committed_s, extra_bytes = slowest
        measured = {
            "blocked_s": sum(across(waits_s)),
            "committed_s": committed_s,
            "wall_s": wall_s,
            "steps": steps,
            "undisturbed_step_s": step_s,
            "lost_s": wall_s - steps * step_s,
            "after_s": after_s,
            "lost_after_s": after_s - steps_after * step_s,
            "bytes": num_bytes,
            "extra_bytes": int(extra_bytes),
        }
        if self._rank == 0:
            print(name, {key: round(value, 3) for key, value in measured.items()}, flush=True)
        return measured

    def _train_until(self, over: Callable[[], bool], saver: Saver) -> list[float]:
        """Train until `over` on all ranks; returns the seconds that each step waited for the saver."""
        waits_s: list[float] = []
        everywhere = bool(across([float(over())], "min")[0])
        while not everywhere:
            before_s = saver.held_up_s
            everywhere = self._training.step(over())
            held_up_s, began = saver.held_up_s - before_s, perf_counter()
            saver.step()
            waits_s.append(held_up_s + perf_counter() - began)
        return waits_s

    def _loads(self, side: str, load: Callable[[], None], folder: str) -> dict[str, float]:
        """Measure the seconds of a load from cold and from warm files, by name.

        Raises:
            RuntimeError: the loaded rows differ from the saved ones.
        """
        found = {}
        for state in ("cold", "warm"):
            if state == "cold" and self._rank == 0:
                forget_cached(self._scratch / folder)
            dist.barrier()
            began = perf_counter()
            load()
            found[f"{side} {state}"] = across([perf_counter() - began])[0]
            if not all(map(torch.equal, self._probe(), self._probes[folder])):
                raise RuntimeError(f"{side} did not load what it had saved")
            self._training.step()
        return found

    def _probe(self) -> list[Tensor]:
        """Copy some rows of every column of every shard, to compare after a load."""
        return [
            column.detach()[:: max(1, shard.num_rows // PROBED_ROWS)].clone()
            for shard in self._shards
            for column in shard.columns.values()
        ]

    def _load_ours(self) -> None:
        assert self._consistent is not None
        self._consistent.load()

    def _remove(self, name: str, *, also_ours: bool = False) -> None:
        """Delete a save by DCP or torch and flush the disk; CPR cleans its directory itself."""
        if self._rank == 0:
            if also_ours or not name.startswith("ours"):
                with suppress(FileNotFoundError):
                    shutil.rmtree(self._scratch / name)
            os.sync()
        dist.barrier()


def across(values: Sequence[float], how: str = "max") -> list[float]:
    """Reduce each value to its largest (`max`) or smallest (`min`) over all ranks."""
    tensor: Tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.MIN)
    return [float(value) for value in tensor.tolist()]


POLL_S: Final = 0.01


class SaveWatch:
    """A thread that measures the time of a save's commit and the peak memory of the process until then."""

    def __init__(self, saver: Saver) -> None:
        self.committed_at = 0.0
        self.peak_bytes = resident_bytes()
        self._saver = saver
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SaveWatch":
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


def resident_bytes() -> int:
    """Resident set size of this process."""
    found: int = psutil.Process().memory_info().rss
    return found


def give_memory_back() -> None:
    """Return freed memory to the system, so that a later need for it shows in the resident set size."""
    gc.collect()
    psutil.heap_trim()
