"""Whether short runs are of one job, and none is there twice: others have no step time in common."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, Final

from cpr.report.records import RunRecords

COMPARED: Final = (
    "model",
    "tables.optimizer",
    "tables.dynamic",
    "sharding",
    "comm",
    "mirror",
    "train.device",
    "train.precision",
    "train.pipeline",
    "train.batching",
)
"""Sections and keys of `config.json` that decide what a step does, but for its samples and workers."""


def refuse_different(runs: Sequence[RunRecords]) -> None:
    """Raise if two runs differ in their data set, or in what a step does, or are the same run.

    Raises:
        ValueError: names both runs and what differs; or a run whose settings are not known.
    """
    for one, other in combinations(runs, 2):
        if one.lines == other.lines:
            raise ValueError(f"{one.name} and {other.name} are the same run, which tells no more than once")
    for run in runs:
        if not run.config or not run.data:
            raise ValueError(
                f"{run.name} has no readable config.json or data.json, which say whether it is of the same "
                "model and data set as the others: copy the whole folder of the run"
            )
    for one, other in pairwise(runs):
        if one.data != other.data:
            raise ValueError(
                f"{one.name} and {other.name} were trained on different data sets: give runs of one data set"
            )
        for name in COMPARED:
            values = [_value(run.config, name) for run in (one, other)]
            if values[0] != values[1]:
                key, (mine, its) = _difference(name, *values)
                raise ValueError(
                    f"{one.name} and {other.name} are runs of different jobs: {key} is {mine!r} and {its!r}. "
                    "Give runs that differ in workers and data.global_batch_size alone"
                )


def _value(config: Mapping[str, Any], name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _difference(name: str, one: Any, other: Any) -> tuple[str, tuple[Any, Any]]:
    """The first key that differs, and both of its values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in (*one, *other) if one.get(key) != other.get(key))
        return f"{name}.{key}", (one.get(key), other.get(key))
    return name, (one, other)
