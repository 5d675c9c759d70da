"""Runs of `dlrm.train` on a small data set, for system tests: settings, and what a run leaves behind."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.synthetic import SyntheticConfig
from tests.datasets import generate_few

CLOCKS = {"seconds", "samples_per_s", "exchange_seconds", "exchange_share", "time", "step_seconds"}
PATIENCE_S = 120.0


def make_dataset(folder: Path) -> Path:
    """Two days of training data and one of evaluation data."""
    generate_few(
        SyntheticConfig(scale=1e-4, days=3, rows_per_day=2000, rows_per_block=500, rows_per_file=1000), folder
    )
    return folder


def settings(dataset: Path, runs: Path, *more: str) -> tuple[str, ...]:
    """Command line of one epoch of 200 steps; `more` settings come last."""
    return (
        *("--recipe", "tiny", "--set", f"data.uri={dataset}", f"train.run_folder={runs}"),
        *("data.global_batch_size=20", "train.log_every_steps=10", *more),
    )


def only_folder(runs: Path) -> Path:
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    return folder


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def curve(folder: Path) -> list[dict]:
    """All metrics of the model that the run has logged, without clocks."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] in {"train", "evaluation"}]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def wait_for(condition: Callable[[], object], process=None) -> None:
    """Wait until a condition holds, while the process, if one is given, runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def wait_for_step(process, runs: Path, step: int) -> Path:
    """Wait until a run below `runs` has logged this step; returns its folder."""

    def found() -> list[Path]:
        logs = runs.glob("*/metrics.jsonl")
        return [path.parent for path in logs if f'"train", "step": {step}' in path.read_text()]

    wait_for(found, process)
    return found()[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def shared_memory() -> Iterator[Path]:
    """A new folder in shared memory; fails if a file is left in it at the end."""
    folder = Path("/dev/shm") / f"cpr-test-{time.time_ns()}"
    folder.mkdir(mode=0o700)
    yield folder
    left = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    assert not left
