"""The configuration of a `data.prepare` job, with its checks."""

from dataclasses import dataclass
from typing import Any, Final

from data.criteo import TERABYTE_CAP, capped
from data.jobs.location import Location
from data.jobs.memory import MemoryNeeds
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
BYTES_PER_BLOCK_BYTE: Final = 17
"""Memory of a worker per byte of a block: text, columns, ids, copies."""
RAW_BYTES_PER_BLOCK_BYTE: Final = 25
"""The same with raw ids: 104 bytes more a sample, in up to three copies, from lines of 40 bytes at least."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """One job of `data.prepare`."""

    raw: tuple[Location, ...]
    """The raw files."""
    out: Location
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
    cluster: str | None = None
    """Address of a Dask scheduler whose workers do the work; None for processes of this machine."""
    memory_bytes: int = 2 << 30
    """Ceiling on the memory of all processes together (proportional set size, code included), or of each
    worker of a cluster. Not in it is the page cache, which the kernel takes back when it must: raw files,
    output, mapped vocabularies."""
    max_bad_ratio: float = 1e-4
    """Bad lines among all lines beyond which the job fails."""

    def __post_init__(self) -> None:
        if not self.raw:
            raise ValueError("give at least one raw file")
        if self.cluster is not None and self.num_processes is not None:
            raise ValueError("--processes is for this machine; with --cluster, the workers do the work")
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
        return self._needs.processes(self.memory_bytes)

    @property
    def block_bytes(self) -> int:
        """Raw text that a worker parses at once, so that all processes stay within `memory_bytes`."""
        return self._needs.block_bytes(self.memory_bytes, self.processes)

    @property
    def _needs(self) -> MemoryNeeds:
        return MemoryNeeds(
            parent_bytes=112 << 20,
            worker_bytes=352 << 20,  # and the samples of a piece
            bytes_per_block_byte=RAW_BYTES_PER_BLOCK_BYTE if self.ids == "raw" else BYTES_PER_BLOCK_BYTE,
            comfortable_block_bytes=2 << 20,
            most_block_bytes=8 << 20,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that affect the output; processes, memory and the ratio do not."""
        if self.ids == "vocabulary":
            return {"ids": self.ids, "min_count": self.least_count, "cap": self.max_rows}
        if self.ids == "raw":
            return {"ids": self.ids}
        return {"ids": self.ids, "table_rows": list(self.static_table_rows)}
