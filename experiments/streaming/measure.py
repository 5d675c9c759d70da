"""The measurements of the experiment, a row each."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from cpr.faults import Killer, KillWorker
from data.dataset import read_manifest
from experiments.harness.record import Row
from experiments.streaming.arrivals import Arrivals
from experiments.streaming.backlog import Backlog, curve
from experiments.streaming.records import account, number_records, read_trained
from experiments.streaming.runs import Run, samples_per_s, training

SLOW: Final = 0.5
"""Arrivals over the speed of training where the lag is measured."""
FAST: Final = 1.5
"""The same where records have to wait."""
FEWEST_STEPS: Final = 4
"""Logged steps of a measurement at least, however slow the machine."""
MOST_WAITING: Final = 60_000
"""Records at which a measurement of the backlog ends: a mock cluster drops those that it has no room for."""
DRAIN_S: Final = 60.0
"""Time in which records that wait must be trained when no more arrive."""
FATES: Final = ("trained", "left_out", "bad")
OLD_S: Final = 3600.0
"""Age of files that are there when a run begins."""
RECORDING: Final = str(Path(__file__).with_name("recording.toml"))
LIMIT_STEPS: Final = 20
"""Steps whose records may wait at most (`stream.backlog`)."""
BURST: Final = 3
"""Records that come at once in such a run, over the limit."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    rounds: int
    rows_per_day: int
    """Of the data set."""
    global_batch: int
    """Of the runs whose AUC and speed are compared."""
    small_batch: int
    """Global batch of the other ones, which train fewer records a second."""
    first_steps: int
    """Steps whose records wait at the start of a run, for its speed."""
    lag_s: float
    backlog_s: float
    """Seconds in which records arrive faster than they are trained."""
    settled_s: float
    """Seconds after a change of the arrivals that do not count."""
    ends_after_s: float
    """Seconds without records after which a stream ends."""
    kills: int
    numbered_rows: int
    """Records of a run with kills."""
    numbered_per_s: float
    """Its arrivals."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Makes the measurements.

    Attributes:
        dataset: folder of a data set, of which all days but the last are trained.
        numbered: data set with a feature more, see `number_records`.
        scratch: for runs, which are removed.
        effort: how much.
    """

    dataset: Path
    numbered: Path
    scratch: Path
    effort: Effort

    @property
    def days(self) -> list[int]:
        """Days that are trained."""
        return list(read_manifest(str(self.dataset)).days[:-1])

    def files(self, seed: int) -> Row:
        """Train on files, in their order."""
        return self._epoch(seed, {"data.train_days": self.days, "data.shuffle": "false"})

    def stream(self, seed: int) -> Row:
        """Train on the same files as a stream that has all of them from the start."""
        folder = self.scratch / "arrived"
        parts = read_manifest(str(self.dataset)).on_days(self.days).parts
        folder.mkdir()
        for number, part in enumerate(parts):
            path = folder / f"{number:05d}.parquet"
            shutil.copyfile(self.dataset / part.path, path)
            written = time.time() - OLD_S + number
            os.utime(path, (written, written))
        return self._epoch(
            seed, _stream_settings(str(folder)) | {"stream.end_after_s": self.effort.ends_after_s}
        )

    def arriving(self, kind: str, number: int) -> Row:
        """Measure the speed, the lag where records arrive slowly, and of Kafka the backlog where fast."""
        effort, row = self.effort, dict[str, Any]()
        with Arrivals(kind, self.dataset, self.days, self.scratch / "arrived") as arrivals:
            settings = _stream_settings(arrivals.uri) | self._small(number)
            with training(self.dataset, self.scratch / "runs", settings) as run:
                samples = arrivals.arrive(effort.first_steps * effort.small_batch)
                run.wait_for_records(samples - 8 * effort.small_batch)
                row["samples_per_s"] = speed = samples_per_s(run.lines("train"))
                arrivals.arrive(per_s=SLOW * speed)
                run.watch(effort.settled_s)
                began = time.time()
                run.watch(effort.lag_s)
                run.wait_for(lambda: len(_since(run, began)) >= FEWEST_STEPS)
                steps = _since(run, began)
                row["lag_s"], row["lag_steps"] = median(each["lag_s"] for each in steps), len(steps)
                if kind == "kafka":
                    row["backlog"] = self._backlog(run, arrivals, FAST * speed)
        self._clear()
        return row

    def limited(self, number: int, speed: float) -> Row:
        """Have more records arrive than are trained, at first many at once, and no more wait than a limit.

        Args:
            number: of the round.
            speed: of training, in samples/s.
        """
        effort = self.effort
        limit = LIMIT_STEPS * effort.small_batch
        with Arrivals("kafka", self.dataset, self.days, self.scratch) as arrivals:
            settings = _stream_settings(arrivals.uri) | self._small(number)
            settings |= {"stream.backlog": limit, "stream.keep": "newest", "train.log_every_steps": 1}
            with training(self.dataset, self.scratch / "runs", settings) as run:
                arrivals.arrive(effort.small_batch)
                run.wait_for_records(1)
                arrivals.arrive(BURST * limit, FAST * speed)
                run.watch(effort.backlog_s)
                arrived = arrivals.arrive(per_s=0.0)
                until = time.monotonic() + DRAIN_S
                run.wait_for(lambda: time.monotonic() > until or _accounted(run) == arrived)
                steps = run.lines("stream")
        self._clear()
        counts = {name: steps[-1][name] for name in FATES}
        return {
            "limit": limit,
            "largest": max(each["waiting"] for each in steps),
            "arrived": arrived,
            **counts,
            "curve": curve(steps),
        }

    def killed(self, kind: str) -> Row:
        """Kill workers of a run, and count how often each record was trained."""
        effort, notes = self.effort, self.scratch / "notes"
        if not self.numbered.exists():
            number_records(self.dataset, self.numbered)
        notes.mkdir()
        num_records = effort.numbered_rows
        with Arrivals(kind, self.numbered, self.days, self.scratch / "arrived", num_records) as arrivals:
            settings = (
                _stream_settings(arrivals.uri)
                | self._small(0)
                | {
                    "stream.end_after_s": effort.ends_after_s,
                    "model.options.folder": notes,
                    "checkpoint.every_steps": 50,
                    "train.log_every_steps": 1,
                }
            )
            arrivals.arrive(per_s=effort.numbered_per_s)
            with training(
                self.numbered,
                self.scratch / "runs",
                settings,
                recipe=RECORDING,
                restarts=1 + effort.kills,
            ) as run:
                with Killer(nodes=[run.pid], patience_s=DRAIN_S) as killer:
                    for number in range(effort.kills):
                        run.wait_for_records(num_records * (number + 1) // (effort.kills + 1))
                        killer.fire(KillWorker(), seed=number)
                report = run.report()
        recoveries = report["failures"]["recoveries"]
        starts = {each["generation"]: each["step"] for each in recoveries}
        found = account(read_trained(notes), starts, num_records)
        shutil.rmtree(notes)
        self._clear()
        return {
            "records": num_records,
            "kills": sum(deed.happened for deed in killer.deeds),
            "recoveries": [each["kind"] for each in recoveries],
            **asdict(found),
        }

    def _epoch(self, seed: int, settings: dict[str, object]) -> Row:
        """Train all records once, and test on the last day."""
        settings |= {
            "data.global_batch_size": self.effort.global_batch,
            "train.seed": seed,
            "train.log_every_steps": 5,
        }
        with training(self.dataset, self.scratch / "runs", settings) as run:
            report = run.report()
            row = {
                "auc": report["metrics"]["auc"],
                "samples": report["samples"],
                "samples_per_s": samples_per_s(run.lines("train")),
            }
        self._clear()
        return row

    def _backlog(self, run: Run, arrivals: Arrivals, per_s: float) -> Row:
        arrivals.arrive(per_s=per_s)
        run.watch(self.effort.settled_s)
        began, arrived = time.time(), list[tuple[float, int]]()

        def is_enough() -> bool:
            arrived.append((time.time(), arrivals.arrive()))
            steps = _since(run, began)
            waiting = steps[-1]["waiting"] if steps else 0
            is_late = time.time() >= began + self.effort.backlog_s or waiting >= MOST_WAITING
            return is_late and len(steps) >= FEWEST_STEPS

        run.wait_for(is_enough)
        steps = _since(run, began)
        found = Backlog.of(steps, arrived)
        return {**asdict(found), "expected": found.expected, "error": found.error, "curve": curve(steps)}

    def _small(self, seed: int) -> dict[str, object]:
        return {
            "data.global_batch_size": self.effort.small_batch,
            "train.seed": seed,
            "train.log_every_steps": 4,
        }

    def _clear(self) -> None:
        for name in ("runs", "arrived"):
            shutil.rmtree(self.scratch / name, ignore_errors=True)


def _stream_settings(uri: str) -> dict[str, object]:
    return {"stream.uri": uri, "stream.rows": "encoded"}


def _accounted(run: Run) -> int:
    return sum(run.lines("stream")[-1][name] for name in FATES)


def _since(run: Run, began: float) -> Sequence[Row]:
    return [each for each in run.lines("stream") if each["time"] >= began]
