"""Progress bar of commands that read or write checkpoints."""

import sys
from typing import Any


class Bar:
    """A progress bar in bytes; silent if stderr is not a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def start(self, num_bytes: int) -> None:
        """Start the bar, or start it over."""
        from tqdm import tqdm  # noqa: PLC0415  # slow

        self.close()
        self._bar = tqdm(
            total=num_bytes,
            desc=self._what,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,
            file=sys.stderr,
        )

    def advance(self, num_bytes: int) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._bar is not None:
            self._bar.close()
