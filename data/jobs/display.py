"""Progress of a job's tasks on the terminal."""

import sys
import time
from typing import Final, TextIO

from tqdm import tqdm

QUIET_INTERVAL_S: Final = 30.0
"""Between two lines when the output is not a terminal."""


def count_text(number: int, what: str) -> str:
    """A count of things, with a plural s."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class ProgressDisplay:
    """Shows share done, rows/s and time left: as a bar on a terminal, as occasional lines elsewhere.

    Args:
        title: of the pass.
        total_bytes: all bytes to read, as stored.
        done_bytes: of which an earlier run has read these.
        stream: where to write.
    """

    def __init__(self, title: str, total_bytes: int, done_bytes: int, stream: TextIO | None = None) -> None:
        self._title, self._total = title, total_bytes
        self._initial = self._done = done_bytes
        self._num_lines = 0
        self._stream = stream or sys.stderr
        self._start_s = self._said_s = time.monotonic()
        self._bar: tqdm[None] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                desc=title,
                total=total_bytes,
                initial=done_bytes,
                file=self._stream,
                bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} < {remaining} {postfix}",
            )

    def update(self, done_bytes: int, num_lines: int) -> None:
        """Show progress: `done_bytes` read in all, and `num_lines` more lines since the last call."""
        self._num_lines += num_lines
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.rows_per_s:,.0f} rows/s", refresh=False)
            self._bar.update(done_bytes - self._done)
        self._done = done_bytes
        now_s = time.monotonic()
        if self._bar is None and now_s - self._said_s >= QUIET_INTERVAL_S:
            self._said_s = now_s
            print(f"{self._title}: {self._summary()}", file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar and print a summary."""
        if self._bar is not None:
            self._bar.close()
        if self._num_lines:
            took = f"{time.monotonic() - self._start_s:.1f} s, {self.rows_per_s:,.0f} rows/s"
            print(f"{self._title}: {self._num_lines:,} rows in {took}", file=self._stream, flush=True)

    @property
    def rows_per_s(self) -> float:
        """Rows read since the start, per second."""
        return self._num_lines / max(time.monotonic() - self._start_s, 1e-9)

    def _summary(self) -> str:
        share = self._done / max(self._total, 1)
        elapsed_s = time.monotonic() - self._start_s
        left_s = elapsed_s * (self._total - self._done) / max(self._done - self._initial, 1)
        return f"{share:.0%}, {self.rows_per_s:,.0f} rows/s, about {left_s:,.0f} s left"


class Meter:
    """Shows the progress of tasks, once for one that runs again since its worker died; a context manager.

    Args:
        title: of the pass.
        num_tasks: tasks of this run.
        total: all there is to do, in bytes or rows.
        done: of which an earlier run has done this.
    """

    def __init__(self, title: str, num_tasks: int, total: int, done: int) -> None:
        self._display = ProgressDisplay(title, total, done)
        self._before = done
        self._reached = [(0, 0)] * num_tasks

    def __call__(self, position: int, reached: tuple[int, int] | None) -> bool:
        """Note what a task has done since its start: bytes or rows, and rows. See `Workers.run`."""
        num_rows = 0
        if reached is not None:
            num_rows = reached[1] - self._reached[position][1]
            self._reached[position] = reached
        self._display.update(self._before + sum(done for done, _ in self._reached), num_rows)
        return True

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._display.close()
