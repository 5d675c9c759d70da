"""A progress bar of commands that read or write much."""

import sys
from typing import Any


class Bar:
    """A progress bar in bytes; silent when nobody watches."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def start(self, num_bytes: int) -> None:
        """Begin, or begin again."""
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
        """So many bytes more."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def close(self) -> None:
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.close()
