"""What a worker says of how far it is. Apart from `display`, which workers need not load."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a worker says after every block."""

    stored_position: int
    """Bytes of the raw file, as stored, up to which it has read."""
    num_lines: int
    """Lines of the block, good and bad."""
    num_bad: int
    """Bad lines of the block."""


Report = Callable[[Progress], None]
