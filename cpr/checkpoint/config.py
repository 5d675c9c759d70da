"""Configuration of checkpointing."""

from dataclasses import dataclass, field
from typing import Final, Literal

from cpr.checkpoint.catalog.committer import Retention
from cpr.checkpoint.format.codecs import CODECS
from cpr.checkpoint.save.staging import PIECE_BYTES
from cpr.fields import check_fields

WRITER_BYTES: Final = 64 * 2**20
"""Part of `host_memory_bytes` for data between the staging buffers and the storage."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Options of a run's checkpoints: directory, memory, codec, compaction and retention."""

    uri: str
    """Checkpoint directory: a path, or a URI of any pyarrow file system such as s3://bucket/run."""
    host_memory_bytes: int = 384 * 2**20
    """Limit of a worker's host memory for copies of table rows; copies of dense parameters and registered
    state come on top. A consistent save makes training wait, before rows change, until the rows that do not
    fit are written; with room for all shards of the worker it waits at most for the copy."""
    codec: str = "exact"
    """Codec of the weights in row saves: exact, fp32, fp16, int8 or int4. Bases are always exact."""
    when_busy: Literal["wait", "skip"] = "wait"
    """Whether a save waits for a running one to finish, or is skipped on all ranks."""
    merge_after: int = 8
    """Compact base and row saves into a new base when there are more row saves than this; 0: never."""
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        check_fields(self)
        least = WRITER_BYTES + 2 * PIECE_BYTES
        if self.host_memory_bytes < least:
            raise ValueError(f"host_memory_bytes is {self.host_memory_bytes}; saving needs at least {least}")
        if self.codec not in CODECS:
            raise ValueError(f"codec is {self.codec!r}; choose one of {', '.join(CODECS)}")
        if self.merge_after < 0:
            raise ValueError("merge_after must not be negative (0: never merge)")
