"""What an injector remembers over restarts: when it began, and which events have happened.

A file of JSON lines that is only appended to, one write a line, under `flock`; a line that was cut off by a
kill does not count.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Beginning:
    """Of the injection, at the first step of the first process."""

    time: float
    """Seconds since the epoch, as restarts and other processes need it."""
    step: int


class InjectionRecord:
    """The record in a file, which all workers of a run share.

    Args:
        path: it and its folder are made when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> Beginning:
        """When the injection began; it begins now if it has not yet.

        Args:
            step: of now.
        """
        with self._locked() as file:
            for line in _lines(file):
                if "begun" in line:
                    return Beginning(line["begun"], line["step"])
            beginning = Beginning(time.time(), step)
            _append(file, {"begun": beginning.time, "step": beginning.step})
            return beginning

    def claim(self, event_name: str, **facts: Any) -> bool:
        """Note that an event happens now; False if it has happened before."""
        return self.claim_since(event_name, **facts)[0]

    def claim_since(self, event_name: str, **facts: Any) -> tuple[bool, float]:
        """As `claim`, and when the event happened, in seconds since the epoch."""
        with self._locked() as file:
            for line in _lines(file):
                if line.get("event") == event_name:
                    return False, line["time"]
            now = time.time()
            _append(file, {"event": event_name, "time": now, "pid": os.getpid(), **facts})
            return True, now

    def events(self) -> list[dict[str, Any]]:
        """All that have happened, as `claim` noted them."""
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
    cut_off = b"\n" if content and not content.endswith(b"\n") else b""
    os.write(file, cut_off + json.dumps(line).encode() + b"\n")
    os.fsync(file)  # the process may be about to die


def _content(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)
