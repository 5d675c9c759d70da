"""Where metrics are written: `metrics.jsonl`, one object a line, and TensorBoard event files.

A full disk must not end a run: failed writes cost a warning, and training continues.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from cpr.humanize import count_text
from dlrm.launch.files import replace_text

_PLAIN: Final = (bool, int, float, str)

logger = logging.getLogger(__name__)

HYPERPARAMETERS: Final = "hyperparameters"
"""Kind of the entry that holds the configuration."""
COMPARED: Final = ("evaluation/auc", "evaluation/log_loss")
"""Scalars that TensorBoard shows next to the hyperparameters of each run."""

Figures = Mapping[str, Any]
"""Numbers, texts, lists or None by name; a nested mapping, such as the learning rates, adds a second name."""


class _JsonLines:
    """Appends lines to a file without buffering, so that a killed run loses no measurement.

    Lines that cannot be written, as on a full disk, wait in memory until they can. On opening, lines of steps
    after `step`, evaluations at `step` and a line cut short by a kill are removed. Raises OSError if the file
    cannot be opened.
    """

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            _truncate(path, step)
        self._path = path
        self._file = path.open("ab", buffering=0)  # a killed process loses no line
        self._waiting = b""
        self._failing = False

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Write one line, with the time (Unix, s). NaN and infinity, which JSON lacks, become null."""
        line = {
            "kind": kind,
            "step": step,
            "time": time.time(),
            **{name: _jsonable(value) for name, value in figures.items()},
        }
        self._waiting += f"{json.dumps(line, allow_nan=False)}\n".encode()
        self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        if self._waiting:
            logger.warning("%s lacks its last %s", self._path, count_text(self._waiting.count(b"\n"), "line"))
        with suppress(OSError):  # the same error was logged above
            self._file.close()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s): training continues, and the lines follow when it can",
                    self._path,
                    error,
                )
            self._failing = True


class _TensorBoard:
    """Writes scalars named `kind/name` and `kind/name/part`; stops writing after the first error."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, kind: str, step: int, figures: Figures) -> None:
        if self._writer is None:
            return
        with self._disabling_on_error():
            if kind == HYPERPARAMETERS:
                self._write_hyperparameters(figures)
                return
            for name, value in figures.items():
                parts = value if isinstance(value, Mapping) else {"": value}
                for part, number in parts.items():
                    if isinstance(number, (int, float)):
                        self._writer.add_scalar("/".join(filter(None, (kind, name, part))), number, step)

    def close(self) -> None:
        with self._disabling_on_error():
            if self._writer is not None:
                self._writer.close()

    def _write_hyperparameters(self, values: Figures) -> None:
        """Write the configuration next to the scalars; `add_hparams` would start another run."""
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415  # with the writer's class

        plain = {name: value if isinstance(value, _PLAIN) else str(value) for name, value in values.items()}
        for summary in hparams(plain, dict.fromkeys(COMPARED)):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)

    @contextmanager
    def _disabling_on_error(self) -> Iterator[None]:
        """Stop writing on the first error: the writer's thread ends with it, and later calls would raise."""
        try:
            yield
        except OSError as error:
            self._writer = None
            _warn_no_events(error)


Sink = _JsonLines | _TensorBoard
"""Takes metrics of one kind, such as `train` or `evaluation`, at one step; None is an undefined value."""


def event_writer() -> Callable[..., Any] | None:
    """Find TensorBoard's writer class; log and return None if the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and slow to import
    except ImportError:
        logger.info("tensorboard is not installed: no event files (metrics.jsonl has the same figures)")
        return None
    return SummaryWriter


def open_sinks(folder: Path, step: int, writer: Callable[..., Any] | None) -> list[Sink]:
    """Open the metrics files of a run folder, removing lines that an earlier start wrote after `step`."""
    sinks: list[Sink] = [_JsonLines(folder / "metrics.jsonl", step)]
    if writer is not None:
        try:
            sinks.append(_TensorBoard(writer(str(folder), purge_step=step + 1)))
        except OSError as error:
            _warn_no_events(error)
    return sinks


def _warn_no_events(error: OSError) -> None:
    logger.warning(
        "TensorBoard's event files cannot be written (%s): training continues without them (metrics.jsonl "
        "has the same figures)",
        error,
    )


def _truncate(path: Path, step: int) -> None:
    """Keep the lines before `step`, in a new file: a paused run that wakes up appends to the old one.

    On a full disk the old file is truncated.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_before(line, step)]
    try:
        replace_text(path, b"".join(kept).decode())
    except OSError:
        if kept == lines[: len(kept)]:
            os.truncate(path, sum(map(len, kept)))


def _is_before(line: bytes, step: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    if not line.endswith(b"\n"):
        return False
    return bool(entry["step"] < step or (entry["step"] == step and entry["kind"] != "evaluation"))


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
