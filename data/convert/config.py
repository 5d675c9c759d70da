"""The configuration of a `data.convert` job, and how its memory is shared out."""

from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from data.convert.write import COMPRESSION, GROUP_ROWS, GROUPS_PER_FILE
from data.jobs.location import Location
from data.jobs.memory import MemoryNeeds
from data.schema import Schema

# Measured with the rows that take most memory for their text: see tests/data/convert/test_system.py.
MEMORY: Final = MemoryNeeds(
    parent_bytes=160 << 20,
    worker_bytes=320 << 20,
    bytes_per_block_byte=40,  # text, columns, a run of four blocks, its sorted copy
    comfortable_block_bytes=4 << 20,
    most_block_bytes=16 << 20,
)
"""Memory of a job while it reads."""
WRITER_FIXED_BYTES: Final = 208 << 20
"""Memory of a worker that writes, code and a row group included, without vocabularies."""


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """One job of `data.convert`."""

    schema: Schema
    """What to make of the columns."""
    files: tuple[Location, ...]
    """The input, in order."""
    out: Location
    """Folder of the data set."""
    like: Location | None = None
    """Data set whose vocabularies are taken, with its `schema`; None to count them."""
    num_processes: int | None = None
    """Worker processes; None for one a core, as far as the memory allows."""
    cluster: str | None = None
    """Address of a Dask scheduler whose workers do the work; None for processes of this machine."""
    memory_bytes: int = 2 << 30
    """Ceiling on the memory of all processes together (proportional set size, code included), or of each
    worker of a cluster. Not in it is the page cache, which the kernel takes back when it must."""
    max_bad_ratio: float = 1e-4
    """Bad rows among all rows beyond which the job fails."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("name at least one file of the table")
        if not 0 <= self.max_bad_ratio <= 1:
            raise ValueError(f"--max-bad-ratio is a share between 0 and 1, not {self.max_bad_ratio}")
        if self.cluster is not None and self.num_processes is not None:
            raise ValueError("--processes is for this machine; with --cluster, the workers do the work")
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"--processes is at least 1, not {self.num_processes}")
        _ = self.block_bytes

    @property
    def processes(self) -> int:
        """Worker processes."""
        if self.num_processes is not None:
            return self.num_processes
        return MEMORY.processes(self.memory_bytes)

    @property
    def block_bytes(self) -> int:
        """Raw bytes that a worker parses at once."""
        return MEMORY.block_bytes(self.memory_bytes, self.processes)

    def writers(self, vocabulary_bytes: int) -> int:
        """Processes that write, each of which holds the vocabularies.

        Raises:
            ValueError: not even one fits into the memory.
        """
        free = self.memory_bytes - MEMORY.parent_bytes
        fit = free // (WRITER_FIXED_BYTES + vocabulary_bytes)
        if fit < 1:
            needed = -(-(MEMORY.parent_bytes + WRITER_FIXED_BYTES + vocabulary_bytes) >> 20)
            raise ValueError(
                f"the vocabularies need --memory {needed}M, not {self.memory_bytes >> 20}M. Start the same "
                "command with that, or make them smaller by min_count or max_rows in another --out"
            )
        return min(self.processes, fit)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that affect the output; processes, memory and the ratio do not."""
        return {
            "schema": self.schema.to_json(),
            "layout": {
                "group_rows": GROUP_ROWS,
                "groups_per_file": GROUPS_PER_FILE,
                "compression": COMPRESSION,
            },
            "polars": metadata.version("polars"),
            "pyarrow": metadata.version("pyarrow"),  # decides the bytes of the Parquet files
        }
