"""Times between a job's failures, from a CSV file or from the histories of runs.

The CSV file has a header and one line for each period in which the job ran, earlier periods first:

    began,ended,failed
    2026-03-01T08:00,2026-03-01T21:30,yes
    2026-03-01T21:40,2026-03-02T09:00,no

`began` and `ended` are ISO 8601 times, or there is one column `lasted` instead, with a unit (`13.5h`).
`failed` tells whether a failure ended the period (yes or no); otherwise the job was stopped, is finished, or
still runs (`ended` is then when the log was written). Periods without a failure count, too. Other columns are
ignored.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from cpr.estimator.history import RunHistory
from cpr.humanize import parse_duration

ANSWERS: Final = {
    **dict.fromkeys(("yes", "true", "1", "y"), True),
    **dict.fromkeys(("no", "false", "0", "n", ""), False),
}


@dataclass(frozen=True)
class Stretch:
    """Consecutive failures of one observation period."""

    gaps_s: tuple[float, ...]
    """From the start to the first failure, and from each failure to the next."""
    unfinished_s: float = 0.0
    """Time without failure at the end (right-censored); 0: observation ended with a failure."""

    def __post_init__(self) -> None:
        if not all(0 < gap < math.inf for gap in self.gaps_s) or not 0 <= self.unfinished_s < math.inf:
            raise ValueError(
                "times between failures must be positive; failures at one moment are one failure of several "
                "nodes"
            )


@dataclass(frozen=True)
class FailureLog:
    """A job's failures and observed time.

    Raises:
        ValueError: the observed time is 0.
    """

    stretches: tuple[Stretch, ...]

    def __post_init__(self) -> None:
        if self.exposure_s <= 0:
            raise ValueError("there is nothing in this log: it needs a time that a job was at work")

    @property
    def gaps_s(self) -> list[float]:
        """All times between failures."""
        return [gap for stretch in self.stretches for gap in stretch.gaps_s]

    @property
    def unfinished_s(self) -> list[float]:
        """Right-censored times: those without a failure at their end."""
        return [stretch.unfinished_s for stretch in self.stretches if stretch.unfinished_s > 0]

    @property
    def exposure_s(self) -> float:
        """Observed time."""
        return sum(self.gaps_s) + sum(self.unfinished_s)

    @property
    def num_failures(self) -> int:
        """Number of failures."""
        return len(self.gaps_s)


def log_of_runs(runs: Iterable[RunHistory]) -> FailureLog:
    """The log of failures in the histories of runs.

    Raises:
        ValueError: two failures at the same time, or no observed time.
    """
    return FailureLog(tuple(Stretch(tuple(run.gaps_s), run.unfinished_gap_s) for run in runs))


def read_log(path: Path) -> FailureLog:
    """Read a failure log from a CSV file; see the module docstring.

    Raises:
        ValueError: a line cannot be parsed; the message names file and line.
        OSError: the file cannot be read.
    """
    stretches: list[Stretch] = []
    gaps: list[float] = []
    for lasted_s, failed in _lines(path):
        if failed:
            gaps.append(lasted_s)
        else:
            stretches.append(Stretch(tuple(gaps), lasted_s))
            gaps = []
    if gaps:
        stretches.append(Stretch(tuple(gaps)))
    if not stretches:
        raise ValueError(f"{path} has a header and no lines: it needs a time that a job was at work")
    return FailureLog(tuple(stretches))


def _lines(path: Path) -> Iterator[tuple[float, bool]]:
    """For each line, the seconds that the job ran, and whether a failure ended that."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        before: datetime | None = None
        try:
            _check_columns(reader.fieldnames or ())
            for row in reader:
                if "lasted" in row:
                    lasted_s = parse_duration(row["lasted"] or "")
                else:
                    began, ended = _time(row, "began"), _time(row, "ended")
                    lasted_s, before = _seconds(began, ended, before), ended
                if not 0 < lasted_s < math.inf:
                    raise ValueError(
                        f"the job was at work for {lasted_s:g} s; that must be positive and finite"
                    )
                yield lasted_s, _failed(row["failed"])
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read as a CSV file in UTF-8: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _check_columns(columns: Sequence[str]) -> None:
    if "failed" not in columns or not ("lasted" in columns or {"began", "ended"} <= set(columns)):
        raise ValueError(
            f"the columns are {', '.join(columns) or '(none)'}; a log of failures has began, ended and "
            "failed, or lasted and failed"
        )


def _time(row: Mapping[str, str | None], column: str) -> datetime:
    text = (row[column] or "").strip()
    if not text:
        raise ValueError(f"{column} is missing; a job that is still at work ended when the log was written")
    return datetime.fromisoformat(text)


def _seconds(began: datetime, ended: datetime, before: datetime | None) -> float:
    """Length of a period; `before` is the end of the previous one."""
    if (began.tzinfo is None) != (ended.tzinfo is None):
        raise ValueError("began and ended need both a time zone, or none")
    if before is not None and (began.tzinfo is None) == (before.tzinfo is None) and began < before:
        raise ValueError(
            f"it began at {began}, before the job ended on the line before ({before}): earlier lines come "
            "first, and time that is in two lines would count twice"
        )
    return (ended - began).total_seconds()


def _failed(answer: str | None) -> bool:
    if answer is None:
        raise ValueError("failed is missing: the line is too short; write yes or no")
    known = ANSWERS.get(answer.strip().lower())
    if known is None:
        raise ValueError(f"failed is {answer!r}; it must be yes or no")
    return known
