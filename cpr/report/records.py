"""The records of a run, read leniently: what is damaged or absent is noted as a problem and left out.

`dlrm.train` writes `metrics.jsonl` and other files into the run's folder. `cpr.PartialRecovery` writes the
history of saves and failures into the checkpoint directory, which is all that a run of another script has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cpr.checkpoint.storage.base import is_local, open_storage
from cpr.errors import CheckpointError
from cpr.estimator.history import FailureCost, RunHistory, SaveCost, read_history
from cpr.humanize import count_text
from cpr.strict_json import build, parse

METRICS_NAME: Final = "metrics.jsonl"
PROBLEMS_LISTED: Final = 10
"""Damaged lines whose numbers are listed."""

Line = Mapping[str, Any]
"""An object of `metrics.jsonl`: has a text `kind`; all its other values may be anything."""


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """What a run has recorded, also while it still trains or after it was killed."""

    name: str
    """Path or URI by which the run was named."""
    lines: Sequence[Line] = ()
    """Of `metrics.jsonl`, in the order of the file; empty for a run of another script than `dlrm.train`."""
    config: Mapping[str, Any]
    """Content of `config.json`; empty without one."""
    data: Mapping[str, Any]
    """Content of `data.json`, which describes the data set; empty without one."""
    versions: Mapping[str, Any]
    """Content of `versions.json`; empty without one."""
    checkpoint: str
    """Path or URI of the checkpoint directory."""
    history: RunHistory | None = None
    """Brought up to date by `lines` that are newer than it."""
    problems: Sequence[str] = ()
    """What could not be read, and why."""

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of one kind, such as `train`."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def saves(self) -> Sequence[SaveCost]:
        """Costs of saves, oldest first: of the history, or where there is none, of the metrics."""
        if self.history is not None:
            return self.history.saves
        return _saves_of(self.lines)

    @property
    def num_failed_saves(self) -> int:
        """Number of failed saves; a resumed run has removed the lines of steps that it trains again."""
        counted = 0 if self.history is None else self.history.failed_saves
        return max(counted, len(self.of_kind("save_failed")))

    @property
    def uncommitted_saves(self) -> dict[float, float]:
        """Saves that have begun and are not committed: seconds that training waited until then, by step."""
        committed = {save.step for save in (*self.saves, *_saves_of(self.lines))}
        begun = [
            (number(line.get("step")), number(line.get("wait_seconds")))
            for line in self.of_kind("save_begun")
        ]
        return {
            step: waited_s
            for step, waited_s in begun
            if step is not None and waited_s is not None and step not in committed
        }

    @property
    def failures(self) -> Sequence[FailureCost]:
        """Failures with their recoveries, oldest first: of the history, or of the metrics."""
        if self.history is not None:
            return self.history.failures
        return _failures_of(self.lines)

    @property
    def pls(self) -> float | None:
        """Portion of lost samples so far; None: unknown."""
        recoveries = self.of_kind("recovery")
        told = number(recoveries[-1].get("pls")) if recoveries else None
        counted = None if self.history is None else self.history.pls
        return max((each for each in (told, counted) if each is not None), default=None)


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 2**63 and math.isfinite(value) else None


def numbers(values: Any) -> dict[str, float]:
    """The finite numbers of a mapping by name; none of anything else."""
    found = {name: number(each) for name, each in values.items()} if isinstance(values, Mapping) else {}
    return {name: each for name, each in found.items() if each is not None}


def read_run(run: str) -> RunRecords:
    """Read all records of a run, also of one that still trains.

    Args:
        run: folder of a run of `dlrm.train`, or checkpoint directory of `cpr.PartialRecovery`, a path or URI.

    Raises:
        ValueError: no run is there; says what to name instead.
    """
    folder = Path(run)
    if is_local(run) and not folder.is_dir():
        raise ValueError(
            f"{run} is no folder: name a run's folder, such as runs/20261121-151353-tiny, or the checkpoint "
            "directory of a script with cpr.PartialRecovery"
        )
    is_trainers = _is_trainers(folder)
    records = read_folder(folder) if is_trainers else _without_folder(run)
    try:
        history = read_history(open_storage(records.checkpoint))
        records = replace(records, history=history and _up_to_date(history, records.lines))
    except (CheckpointError, OSError, ValueError) as error:
        problem = f"the history of saves and failures cannot be read: {error}"
        records = replace(records, problems=(*records.problems, problem))
    if not is_trainers and records.history is None:
        raise ValueError(_not_a_run(run, records.problems))
    return records


def read_folder(folder: Path, history: RunHistory | None = None) -> RunRecords:
    """Read the records in the folder of a run of `dlrm.train`; the checkpoint directory is not touched.

    Args:
        folder: of the run.
        history: of its saves and failures, if known.
    """
    problems: list[str] = []
    config, data, versions = (
        _read_object(folder / f"{name}.json", problems) for name in ("config", "data", "versions")
    )
    lines = _read_lines(folder / METRICS_NAME, problems)
    return RunRecords(
        name=str(folder),
        lines=lines,
        config=config,
        data=data,
        versions=versions,
        checkpoint=_checkpoint_in(folder, config),
        history=history and _up_to_date(history, lines),
        problems=problems,
    )


def checkpoint_of(place: str) -> str:
    """The checkpoint directory of a run of `dlrm.train`, by its folder; any other path or URI unchanged."""
    folder = Path(place)
    return _checkpoint_in(folder, _read_object(folder / "config.json", [])) if _is_trainers(folder) else place


def _is_trainers(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS_NAME, "config.json"))


def _checkpoint_in(folder: Path, config: Mapping[str, Any]) -> str:
    checkpoint = config.get("checkpoint")
    uri = checkpoint.get("uri") if isinstance(checkpoint, Mapping) else None
    return uri if uri and isinstance(uri, str) else str(folder / "checkpoint")


def _up_to_date(history: RunHistory, lines: Sequence[Line]) -> RunHistory:
    """The history continued by newer lines: it is written when a save ends, they while training continues."""
    newer = [line for line in lines if _time(line) > history.clock_s]
    if not newer:
        return history
    trained = next((line for line in reversed(newer) if line["kind"] == "train"), {})
    steps, samples = number(trained.get("step")), number(trained.get("samples"))
    saved, recovered = ({each.step for each in known} for known in (history.saves, history.failures))
    failures = [
        replace(
            failure,
            elapsed_s=history.elapsed_s + _time(line) - history.clock_s,
            nodes_lost=failure.lost_share * history.nodes,
        )
        for line in newer
        for failure in _failures_of([line])
        if failure.step not in recovered
    ]
    clock_s = max(map(_time, newer))
    return replace(
        history,
        steps_done=history.steps_done if steps is None else int(steps),
        samples_done=history.samples_done if samples is None else int(samples),
        elapsed_s=history.elapsed_s + clock_s - history.clock_s,
        clock_s=clock_s,
        saves=(*history.saves, *(each for each in _saves_of(newer) if each.step not in saved)),
        failures=(*history.failures, *failures),
    )


def _time(line: Line) -> float:
    return number(line.get("time")) or 0.0


def _without_folder(uri: str) -> RunRecords:
    return RunRecords(name=uri, config={}, data={}, versions={}, checkpoint=uri)


def _not_a_run(run: str, problems: Sequence[str]) -> str:
    if problems:
        return f"{run} is not the checkpoint directory of a run: {problems[0]}"
    inside = sorted(Path(run).glob(f"*/{METRICS_NAME}")) if is_local(run) else []
    if inside:
        return f"{run} holds {count_text(len(inside), 'run')}: name one of them, such as {inside[-1].parent}"
    return (
        f"{run} holds no run: there is neither {METRICS_NAME}, which dlrm.train writes into its run's "
        "folder, nor history-<epoch>.json, which cpr.PartialRecovery writes into its checkpoint directory"
    )


def _read_object(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """The object in a JSON file; an empty one, with a problem, if it cannot be read."""
    try:
        found = parse(path.read_bytes())
        if not isinstance(found, Mapping):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read, and is left out: {error}")
        return {}
    return found


def _read_lines(path: Path, problems: list[str]) -> list[Line]:
    """The objects of a file of JSON lines; damaged lines are left out, with a problem."""
    lines, damaged = [], []
    try:
        with path.open("rb") as file:
            for at, text in enumerate(file, start=1):
                try:
                    line = parse(text)
                    is_sound = isinstance(line, Mapping) and isinstance(line.get("kind"), str)
                except ValueError:
                    is_sound = False
                if is_sound:
                    lines.append(line)
                else:
                    damaged.append(at)
    except FileNotFoundError:
        problems.append(f"there is no {path.name}")
    except OSError as error:
        problems.append(f"{path.name} cannot be read further: {error}")
    if damaged:
        listed = ", ".join(map(str, damaged[:PROBLEMS_LISTED]))
        more = ", ..." if len(damaged) > PROBLEMS_LISTED else ""
        problems.append(
            f"{len(damaged)} of {len(lines) + len(damaged)} lines of {path.name} are damaged, and left out "
            f"(line {listed}{more}); a line that a running trainer is writing just now looks like that, too"
        )
    return lines


def _saves_of(lines: Sequence[Line]) -> list[SaveCost]:
    saves = (_save_of(line) for line in lines if line["kind"] == "save")
    return [save for save in saves if save is not None]


def _failures_of(lines: Sequence[Line]) -> list[FailureCost]:
    failures = (_failure_of(line) for line in lines if line["kind"] == "recovery")
    return [failure for failure in failures if failure is not None]


def _save_of(line: Line) -> SaveCost | None:
    kind = next((name for name in ("base", "rows") if name in line), "")
    figures = numbers(line.get(kind))
    try:
        return build(
            SaveCost,
            {
                "step": line.get("step"),
                "kind": kind,
                "num_bytes": int(figures["bytes"]),
                "blocked_s": figures["wait_seconds"],
                "seconds": figures["seconds"],
            },
        )
    except (ValueError, KeyError):
        return None


def _failure_of(line: Line) -> FailureCost | None:
    try:
        return build(
            FailureCost,
            {
                "elapsed_s": 0.0,
                "kind": line.get("how"),
                "lost_share": number(line.get("lost_share")) or 0.0,
                "nodes_lost": 0.0,
                "seconds": {name: max(0.0, each) for name, each in numbers(line.get("phases")).items()},
                "step": line.get("step"),
                "pls_added": number(line.get("pls_added")),
            },
        )
    except ValueError:
        return None
