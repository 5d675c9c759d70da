"""Where figures go: `metrics.jsonl`, one object a line, and TensorBoard's event files.

Figures are not worth a run: a full disk costs a warning, and training goes on.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from dlrm.launch.files import replace_text

_PLAIN: Final = (bool, int, float, str)

logger = logging.getLogger(__name__)

HYPERPARAMETERS: Final = "hyperparameters"
"""Kind of the figures that are the configuration."""
COMPARED: Final = ("evaluation/auc", "evaluation/log_loss")
"""Scalars beside the hyperparameters, where TensorBoard compares runs."""

Figures = Mapping[str, Any]
"""Numbers, texts, lists or None by name, and numbers by a second name, such as the learning rates."""


class Sink(Protocol):
    """Takes figures of one kind, such as `train` or `evaluation`, at one step."""

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Called with every new set of figures; None stands for what is not defined."""

    def close(self) -> None:
        """Called once at the end."""


class JsonLines:
    """Appends to a file, a line at a time: a killed run has lost nothing that was measured.

    What cannot be written, as on a full disk, waits in memory until it can.

    Args:
        path: of the file.
        step: the run goes on from it: what was written of later steps, and evaluations at it, are taken back,
            and so is a line that a kill cut short.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            _take_back(path, step)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._failing = False

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Write one line. NaN and infinity, which JSON lacks, become null."""
        line = {"kind": kind, "step": step, **{name: _jsonable(value) for name, value in figures.items()}}
        self._waiting += f"{json.dumps(line, allow_nan=False)}\n".encode()
        self._write_waiting()

    def close(self) -> None:
        """Close the file."""
        self._write_waiting()
        if self._waiting:
            logger.warning("%s lacks its last %d lines", self._path, self._waiting.count(b"\n"))
        with suppress(OSError):  # which close has seen before
            self._file.close()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s): training goes on, and its lines follow when it can",
                    self._path,
                    error,
                )
            self._failing = True


class TensorBoard:
    """Event files for TensorBoard, as `kind/name` and `kind/name/part`; no more of them once one fails.

    Hyperparameters are where it compares runs.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Add a scalar for every number."""
        if self._writer is None:
            return
        with self._giving_up():
            if kind == HYPERPARAMETERS:
                self._write_hyperparameters(figures)
                return
            for name, value in figures.items():
                parts = value if isinstance(value, Mapping) else {"": value}
                for part, number in parts.items():
                    if isinstance(number, (int, float)):
                        self._writer.add_scalar("/".join(filter(None, (kind, name, part))), number, step)

    def close(self) -> None:
        """Flush and close the files."""
        with self._giving_up():
            if self._writer is not None:
                self._writer.close()

    def _write_hyperparameters(self, values: Figures) -> None:
        """Into the same file as the scalars: `add_hparams` would make a run of its own."""
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415  # with the writer's class

        plain = {name: value if isinstance(value, _PLAIN) else str(value) for name, value in values.items()}
        for summary in hparams(plain, dict.fromkeys(COMPARED)):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """The writer's thread ends with its first error, which every call raises from then on."""
        try:
            yield
        except OSError as error:
            self._writer = None
            _say_no_events(error)


def event_writer() -> Callable[..., Any] | None:
    """The class that writes event files; None without the package tensorboard, and a word about it."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and slow to import
    except ImportError:
        logger.info("tensorboard is not installed: no event files (metrics.jsonl has the same figures)")
        return None
    return SummaryWriter


def open_sinks(folder: Path, step: int, writer: Callable[..., Any] | None) -> list[Sink]:
    """The sinks of a run folder.

    Args:
        folder: of the run.
        step: from which it goes on: what an earlier start wrote of later steps is taken back.
        writer: see `event_writer`; None: there is a sink less.
    """
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", step)]
    if writer is not None:
        try:
            sinks.append(TensorBoard(writer(str(folder), purge_step=step + 1)))
        except OSError as error:
            _say_no_events(error)
    return sinks


def _say_no_events(error: OSError) -> None:
    logger.warning(
        "TensorBoard's event files cannot be written (%s): training goes on without them (metrics.jsonl has "
        "the same figures)",
        error,
    )


def _take_back(path: Path, step: int) -> None:
    """Leave the lines before `step`; as they come first, that needs no room on the disk."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_before(line, step)]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
    else:
        replace_text(path, b"".join(kept).decode())


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
