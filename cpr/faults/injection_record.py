"""Record of an injection over restarts: its start, and the events that have happened.

An append-only file of JSON lines with one write per line, under `flock`; incomplete lines of killed processes
are ignored.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class InjectionRecord:
    """The record in a file shared by all workers of a run.

    Args:
        path: of the file; the file and its folder are created when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> tuple[float, int]:
        """Start of the injection, in seconds since the epoch, and first step: those of the first call."""
        with self._locked() as file:
            for line in _lines(file):
                if "begun" in line:
                    return line["begun"], line["step"]
            now = time.time()
            _append(file, {"begun": now, "step": step})
            return now, step

    def claim(self, event_name: str, **facts: Any) -> tuple[bool, float]:
        """Record that an event happens now, unless it has happened before.

        Returns:
            Whether it happens now, and its time in seconds since the epoch.
        """
        with self._locked() as file:
            for line in _lines(file):
                if line.get("event") == event_name:
                    return False, line["time"]
            now = time.time()
            _append(file, {"event": event_name, "time": now, "pid": os.getpid(), **facts})
            return True, now

    def events(self) -> list[dict[str, Any]]:
        """All events that have happened, as recorded by `claim`."""
        with self._locked() as file:
            return [line for line in _lines(file) if "event" in line]

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _lines(file: int) -> list[dict[str, Any]]:
    lines = []
    for text in _content(file).splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _append(file: int, line: dict[str, Any]) -> None:
    content = _content(file)
    newline = b"\n" if content and not content.endswith(b"\n") else b""  # after an incomplete line
    os.write(file, newline + json.dumps(line).encode() + b"\n")
    os.fsync(file)  # the process may be about to die


def _content(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
