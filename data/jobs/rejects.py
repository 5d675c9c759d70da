"""The file of what a job could not read, and the limit on its share."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from data.jobs.files import DigestFile
from data.jobs.location import Location

REJECTS_NAME: Final = "rejects.jsonl"


class Record(Protocol):
    """Record of a finished piece of work."""

    @property
    def num_rejects(self) -> Mapping[str, int]:
        """Bad lines or rows by reason."""


def by_reason(records: Iterable[Record]) -> Counter[str]:
    """Bad lines or rows of all records, by reason."""
    return sum((Counter(record.num_rejects) for record in records), Counter[str]())


def rejects_entry(written: DigestFile, num_lines: int, reasons: Mapping[str, int]) -> dict[str, Any]:
    """The manifest's entry about bad lines or rows, which were `written`."""
    return {
        "path": REJECTS_NAME,
        "num_bytes": written.num_bytes,
        "sha256": written.sha256,
        "num_lines": num_lines,
        "num_rejects": dict(reasons),
    }


def too_many(out: Location, bad: str, reasons: str, max_bad_ratio: float, repair: str) -> ValueError:
    """The error for too many bad lines or rows.

    Args:
        out: folder of the data set, with the list of them.
        bad: how many are bad, e.g. `7 of 53 rows are bad`.
        reasons: numbers by reason.
        max_bad_ratio: what is allowed.
        repair: what can be repaired.
    """
    return ValueError(
        f"{bad} ({reasons}): more than --max-bad-ratio {max_bad_ratio:g} allows. {out / REJECTS_NAME} lists "
        f"them with file and position. Repair {repair} and start in a new --out, or allow more"
    )
