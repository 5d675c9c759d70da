"""The configuration of a `data.prepare` job, with its checks."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from data.criteo import TERABYTE_CAP, capped
from data.prepare.tables import PUBLISHED, parse_rows, published_as, roomy_rows

ONE_PASS: Final = ("modulo", "hash")
"""Id rules for tables whose sizes are known beforehand."""
ID_RULES: Final = (*ONE_PASS, "vocabulary", "raw")
DEFAULT_MIN_COUNT: Final = 3
MOST_DAYS: Final = 10_000

_READ_BY: Final = {
    "table_rows": ONE_PASS,
    "cap": (*ONE_PASS, "vocabulary"),
    "min_count": ("vocabulary",),
}
"""Id rules by setting, for settings that some id rules do not read."""

# Measured with lines of every length, down to the shortest (which make the most rows of a byte).
PARENT_FIXED_BYTES: Final = 112 << 20
"""Memory of the parent process, code included."""
WORKER_FIXED_BYTES: Final = 352 << 20
"""Memory of a worker for its code and the samples of a piece, without a block."""
BYTES_PER_BLOCK_BYTE: Final = 17
"""Memory of a worker per byte of a block: text, columns, ids, copies."""
RAW_BYTES_PER_BLOCK_BYTE: Final = 25
"""The same with raw ids: 104 bytes more a sample, in up to three copies, from lines of 40 bytes at least."""
_COMFORTABLE_BLOCK_BYTES: Final = 2 << 20
_MIN_BLOCK_BYTES: Final = 256 << 10
_MAX_BLOCK_BYTES: Final = 8 << 20
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """One job of `data.prepare`."""

    raw: tuple[Path, ...]
    """The raw files."""
    out: Path
    """Folder of the data set."""
    ids: str = "modulo"
    """Rule that maps categories to ids, one of `ID_RULES`."""
    table_rows: str | None = None
    """Rows of the 26 tables for modulo and hash: `terabyte` or `kaggle` for the published sizes, one number
    for all, or 26 numbers with commas; None for the sizes of the data set that the file names suggest, with
    additional rows in small tables."""
    cap: int | None = None
    """Rows a table may have at most, not for raw; None for `TERABYTE_CAP`."""
    min_count: int | None = None
    """Vocabulary only: a value that occurs less often is rare; None for `DEFAULT_MIN_COUNT`."""
    num_days: int | None = None
    """Days to cut a single file into that is not named `day_N`; None for the default."""
    num_processes: int | None = None
    """Worker processes; None for one a core, as far as the memory allows."""
    memory_bytes: int = 2 << 30
    """Ceiling on the memory of all processes together (proportional set size, code included). Not in it is
    the page cache, which the kernel takes back when it must: raw files, output, mapped vocabularies."""
    max_bad_ratio: float = 1e-4
    """Bad lines among all lines beyond which the job fails."""

    def __post_init__(self) -> None:
        if not self.raw:
            raise ValueError("give at least one raw file")
        if self.ids not in ID_RULES:
            raise ValueError(f"--ids is one of {', '.join(ID_RULES)}, not {self.ids!r}")
        if not 0 <= self.max_bad_ratio <= 1:
            raise ValueError(f"--max-bad-ratio is a share between 0 and 1, not {self.max_bad_ratio}")
        for name, rules in _READ_BY.items():
            if getattr(self, name) is not None and self.ids not in rules:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for --ids {' or '.join(rules)}; with --ids {self.ids} "
                    "nothing reads it, so leave it out"
                )
        for flag, value, least in (
            ("--cap", self.max_rows, 3),
            ("--min-count", self.least_count, 1),
            ("--processes", self.processes, 1),
            ("--days", 1 if self.num_days is None else self.num_days, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} is at least {least}, not {value}")
        if self.num_days is not None and self.num_days > MOST_DAYS:
            raise ValueError(f"--days is at most {MOST_DAYS:,}, not {self.num_days:,}: each becomes a folder")
        _ = self.identity, self.block_bytes

    @property
    def max_rows(self) -> int:
        """Rows a table may have at most."""
        return TERABYTE_CAP if self.cap is None else self.cap

    @property
    def least_count(self) -> int:
        """How often a value of a vocabulary occurs at least."""
        return DEFAULT_MIN_COUNT if self.min_count is None else self.min_count

    @property
    def published(self) -> str | None:
        """Data set with the published table sizes; None if the user's numbers or the values decide.

        Raises:
            ValueError: the file names suggest no data set.
        """
        if self.ids not in ONE_PASS:
            return None
        if self.table_rows is None:
            return published_as(self.raw)
        return self.table_rows if self.table_rows in PUBLISHED else None

    @property
    def static_table_rows(self) -> tuple[int, ...]:
        """Rows of the 26 tables, capped, for modulo and hash.

        Raises:
            ValueError: the numbers are invalid, or missing and the file names suggest no data set.
        """
        given = self.table_rows
        rows = roomy_rows(published_as(self.raw)) if given is None else parse_rows(given)
        return capped(rows, self.max_rows)

    @property
    def processes(self) -> int:
        """Worker processes."""
        if self.num_processes is not None:
            return self.num_processes
        worker_bytes = WORKER_FIXED_BYTES + _COMFORTABLE_BLOCK_BYTES * self._bytes_per_block_byte
        return max(1, min(os.cpu_count() or 1, (self.memory_bytes - PARENT_FIXED_BYTES) // worker_bytes))

    @property
    def block_bytes(self) -> int:
        """Raw text that a worker parses at once, so that all processes stay within `memory_bytes`."""
        share = (self.memory_bytes - PARENT_FIXED_BYTES) // self.processes - WORKER_FIXED_BYTES
        block_bytes = share // self._bytes_per_block_byte
        if block_bytes < _MIN_BLOCK_BYTES:
            needed = PARENT_FIXED_BYTES + self.processes * (
                WORKER_FIXED_BYTES + _MIN_BLOCK_BYTES * self._bytes_per_block_byte
            )
            raise ValueError(
                f"{self.processes} processes need at least --memory {-(-needed >> 20)}M, "
                f"not {self.memory_bytes >> 20}M; give more memory or fewer --processes"
            )
        return min(block_bytes, _MAX_BLOCK_BYTES)

    @property
    def _bytes_per_block_byte(self) -> int:
        return RAW_BYTES_PER_BLOCK_BYTE if self.ids == "raw" else BYTES_PER_BLOCK_BYTE

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that affect the output; processes, memory and the ratio do not."""
        if self.ids == "vocabulary":
            return {"ids": self.ids, "min_count": self.least_count, "cap": self.max_rows}
        if self.ids == "raw":
            return {"ids": self.ids}
        return {"ids": self.ids, "table_rows": list(self.static_table_rows)}


def parse_bytes(text: str) -> int:
    """Bytes from text such as `2G`, `500M` or `1048576`; units are powers of 1024.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 2G or 500M")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])
