"""Where figures go: `metrics.jsonl`, one object a line, and TensorBoard's event files."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dlrm.telemetry.folder import replace_text

logger = logging.getLogger(__name__)

Figures = Mapping[str, "float | int | Mapping[str, float] | None"]


class Sink(Protocol):
    """Takes figures of one kind, `train` or `evaluation`, at one step."""

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Called with every new set of figures; None stands for what is not defined."""

    def close(self) -> None:
        """Called once at the end."""


class JsonLines:
    """Appends to a file, a line and a flush at a time: a killed run has lost nothing that was measured.

    Args:
        path: of the file.
        step: the run goes on from it: training after it, and evaluations at it or after, are taken back, and
            so is a line that a kill cut short.
    """

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _is_before(line, step)]
            replace_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a")

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Write one line. NaN and infinity, which JSON lacks, become null."""
        line = {"kind": kind, "step": step, **{name: _jsonable(value) for name, value in figures.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard, as `kind/name` and `kind/name/part`."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, kind: str, step: int, figures: Figures) -> None:
        """Add a scalar for every number."""
        for name, value in figures.items():
            parts = value if isinstance(value, Mapping) else {"": value}
            for part, number in parts.items():
                if number is not None:
                    self._writer.add_scalar("/".join(filter(None, (kind, name, part))), number, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


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
        sinks.append(TensorBoard(writer(str(folder), purge_step=step + 1)))
    return sinks


def _is_before(line: str, step: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return bool(entry["step"] < step or (entry["step"] == step and entry["kind"] == "train"))


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
