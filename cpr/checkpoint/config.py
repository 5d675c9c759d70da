"""How a run saves."""

from dataclasses import dataclass, field
from typing import Final, Literal

from cpr.checkpoint.catalog.retention import Retention
from cpr.checkpoint.format.codecs import CODECS
from cpr.checkpoint.save.staging import PIECE_BYTES
from cpr.fields import check_fields

WRITER_BYTES: Final = 64 * 2**20
"""Part of the memory ceiling for what is on its way from the staged rows to the storage."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How a run saves."""

    uri: str
    """Directory: a path, or any pyarrow file system's URI such as s3://bucket/run."""
    host_memory_bytes: int = 512 * 2**20
    """Ceiling of the extra host memory of a worker for table rows; dense parameters and registered state are
    copied whole on top of it. A consistent save makes training wait, before rows change, until what does not
    fit is written; with room for all shards of the worker it waits at most for the copy."""
    codec: str = "exact"
    """Of the weights in row saves: exact, fp32, fp16, int8 or int4. Bases are always exact."""
    when_busy: Literal["wait", "skip"] = "wait"
    """A save that is asked for while another is under way waits for it, or is skipped on all ranks."""
    merge_after: int = 8
    """Merge base and row saves into a new base when there are more row saves than this; 0: never."""
    retention: Retention = field(default_factory=Retention)
    """Which states are kept."""

    def __post_init__(self) -> None:
        check_fields(self)
        least = WRITER_BYTES + 2 * PIECE_BYTES
        if self.host_memory_bytes < least:
            raise ValueError(f"host_memory_bytes is {self.host_memory_bytes}; saving needs at least {least}")
        if self.codec not in CODECS:
            raise ValueError(f"codec is {self.codec!r}; choose one of {', '.join(CODECS)}")
        if self.merge_after < 0:
            raise ValueError("merge_after must not be negative (0: never merge)")
