"""Progress messages of workers; separate from `display`, which workers do not import."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress message of a worker after a block."""

    stored_position: int
    """Bytes of the raw file, as stored, that have been read."""
    num_lines: int
    """Lines of the block, good and bad."""
    num_bad: int
    """Bad lines of the block."""


Report = Callable[[Progress], None]
