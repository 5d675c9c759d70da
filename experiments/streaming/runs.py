"""Runs of the trainer with two workers, and what the lines of their `metrics.jsonl` say while they train."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from experiments.harness import launch
from experiments.harness.record import Row

WORKERS: Final = 2
POLL_S: Final = 0.5
PATIENCE_S: Final = 600.0
BEGIN, END = 0.3, 0.9
"""Shares of the samples of a run between which its speed is measured: after the start, before the end, at
which a rank may have no records left."""


class Run:
    """A run that was started.

    Args:
        started: its launcher.
        folder: that has its run folder.
    """

    def __init__(self, started: launch.Launch, folder: Path) -> None:
        self._launch, self._folder = started, folder

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._launch.process.pid

    def lines(self, kind: str) -> list[Row]:
        """Lines of a kind, one for each logged step."""
        paths = self._folder.glob("*/metrics.jsonl")
        lines = [line for path in paths for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    @property
    def trained(self) -> int:
        """Records of a stream that were trained up to the last logged step."""
        return int(self.lines("stream")[-1]["trained"]) if self.lines("stream") else 0

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        Raises:
            RuntimeError: the run has ended, or it takes too long; the message has the end of its output.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self._launch.process.poll() is not None:
                raise self._launch.failure("ended too early")
            if time.monotonic() > deadline:
                raise self._launch.failure(f"did not get on for {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)

    def wait_for_records(self, trained: int) -> None:
        """Wait until so many records of a stream are trained; see `wait_for`."""
        self.wait_for(lambda: self.trained >= trained)

    def watch(self, seconds: float) -> None:
        """Wait while it trains; see `wait_for`."""
        until = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() >= until)

    def report(self) -> dict[str, Any]:
        """Wait for its end, and read its report.

        Raises:
            RuntimeError: it failed; the message has the end of its output.
        """
        self._launch.check_ended_well(PATIENCE_S)
        (path,) = self._folder.glob("*/report.json")
        report: dict[str, Any] = json.loads(path.read_text())
        return report


@contextmanager
def training(
    dataset: Path, folder: Path, settings: Mapping[str, object], *, recipe: str = "tiny", restarts: int = 0
) -> Iterator[Run]:
    """Start a run, and end it with the block.

    Args:
        dataset: folder of the data set.
        folder: for its run folder.
        settings: in addition to those that all runs of the experiment share.
        recipe: its name or file.
        restarts: how often workers may be restarted.
    """
    common = {
        "data.uri": dataset,
        "train.run_folder": folder,
        "train.precision": "fp32",
        "train.device": "cpu",
        "train.evaluate_every_steps": 0,
    }
    arguments = [
        "--recipe",
        recipe,
        "--set",
        *(f"{name}={each}" for name, each in (common | {**settings}).items()),
    ]
    command = launch.torchrun_command("dlrm.train", arguments, WORKERS, restarts)
    with launch.running(command, threads=1) as started:
        yield Run(started, folder)


def samples_per_s(lines: Sequence[Row]) -> float:
    """Speed of a run between `BEGIN` and `END` of its samples, by its lines of the kind `train`."""
    last = lines[-1]["samples"]
    within = [line for line in lines if BEGIN * last <= line["samples"] <= END * last]
    return float((within[-1]["samples"] - within[0]["samples"]) / (within[-1]["time"] - within[0]["time"]))
