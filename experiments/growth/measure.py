"""Measures one job of `experiments.growth` under both contenders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from experiments.growth.axes import Point
from experiments.harness.record import Row
from experiments.harness.workload import CORES
from experiments.recovery.timing import CONTENDERS, TimedRun, timed_run

MEMORY: Final = Path("/dev/shm")


def measure(point: Point, scratch: Path, order: int) -> Row:
    """Costs of a job under both contenders, which take turns in coming first; deletes what they leave.

    Returns:
        By contender: `start`, `kill` and, of CPR, `node` and `resume`: seconds of each phase from the launch,
        or from the kill, to a step of all ranks; the slowest rank's costs (`experiments.recovery.costs`);
        `table_bytes`, `trained_bytes` and `peak_bytes`: those of all processes together. Of CPR also
        `write_s`: seconds in which as many processes write the tables' bytes into new shared memory, the mean
        of once before and once after, as memory that was free for long takes longer.
    """
    row: Row = {"axis": point.axis, "value": point.value, "world_size": point.world_size}
    for name in list(CONTENDERS)[:: -1 if order % 2 else 1]:
        memory = MEMORY / f"growth-{os.getpid()}"
        memory.mkdir(mode=0o700)
        os.environ["CPR_RESIDENT_ROOT"] = str(memory)
        try:
            row[name] = _contender(name, point, scratch, memory)
        finally:
            del os.environ["CPR_RESIDENT_ROOT"]
            shutil.rmtree(memory, ignore_errors=True)
            shutil.rmtree(scratch, ignore_errors=True)
    return row


def _contender(name: str, point: Point, scratch: Path, memory: Path) -> Row:
    threads = max(1, CORES // point.world_size)
    started: dict[str, Any] = {"scratch": scratch, "threads": threads, "measures": True}
    found: Row = {}
    before_s = _write_s(point, memory) if name == "ours" else 0.0
    with timed_run(name, point.job, point.world_size, **started) as run:
        found["start"] = run.wait_for("stepped")
        run.wait_for("measured")
        found |= _costs(run)
        found["kill"] = run.kill(point.world_size - 1)
        if name == "ours" and point.world_size > 1:
            found["node"] = run.kill(point.world_size - 1, with_memory=True)
    if name == "ours":
        for left in memory.iterdir():
            shutil.rmtree(left, ignore_errors=True)  # whose janitor may be at it, too
        with timed_run(name, point.job, point.world_size, **started | {"measures": False}) as run:
            found["resume"] = run.wait_for("stepped")
        for left in memory.iterdir():
            shutil.rmtree(left, ignore_errors=True)  # whose janitor may be at it, too
        found["write_s"] = (before_s + _write_s(point, memory)) / 2
    return found


def _write_s(point: Point, memory: Path) -> float:
    """Seconds in which all processes write their share of the tables into new shared memory, all at once."""
    num_bytes, writers = point.job.table_bytes // point.world_size, []
    for number in range(point.world_size):
        path = memory / f"written-{number}"
        path.touch()
        os.truncate(path, num_bytes // 4 * 4)
        command = [sys.executable, "-m", "experiments.growth.write", str(num_bytes), str(path)]
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    took_s = [float(writer.communicate()[0]) for writer in writers]
    for number in range(point.world_size):
        (memory / f"written-{number}").unlink()
    return max(took_s)


def _costs(run: TimedRun) -> Row:
    measured = run.marks("measured").values()
    others = [process for process in run.processes if process.pid not in {each["pid"] for each in measured}]
    others_bytes = sum(process.memory_full_info().pss for process in others)
    found: Row = {}
    for name in set.intersection(*map(set, measured)):
        values = [each[name] for each in measured]
        if name.endswith("_s"):
            found[name] = max(values)
        elif name in {"trained_bytes", "peak_bytes"}:
            found[name] = sum(values) + others_bytes
        elif name == "table_bytes":
            found[name] = sum(values)
        elif name.endswith("_bytes"):
            found[name] = values[0]  # of all ranks together
    return found
