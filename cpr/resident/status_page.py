"""Status page of a worker: numbers in shared memory that other processes read after the worker's death.

Each number is written by one aligned 8-byte store, so that a kill leaves either the old or the new one.
"""

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, Final

from cpr.errors import DamagedMemoryError
from cpr.processes import Process, launcher_of_this_worker
from cpr.resident.folders import open_private, other_version, reading
from cpr.resident.regions import allocate

MAGIC: Final = int.from_bytes(b"CPRMARKS", "little")
VERSION: Final = 4
PAGE_BYTES: Final = 4096
REASON_BYTES: Final = 500
REASON_AT: Final = 1024
NOTHING: Final = -1
"""Value of a number that was not set yet."""
WORDS: Final = (
    *("magic", "version", "pid", "start_ticks", "generation", "step_finished", "update_begun", "slot"),
    *("launcher_pid", "launcher_start_ticks", "heartbeat_ns", "left_ns", "stopped_in"),
    *("epoch", "reason_bytes"),
)


class _Word:
    """Descriptor of one number in the page."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = WORDS.index(name)

    def __get__(self, status: Any, owner: type) -> Any:
        return self if status is None else status._words[self._place]

    def __set__(self, status: Any, value: int) -> None:
        status._words[self._place] = value


class StatusPage:
    """State of a worker and its memory, live in shared memory; an empty page is created if there is none.

    Raises:
        DamagedMemoryError: the file is no status page.
        UnreadableMemoryError: the page cannot be read now, or was written by another version.
    """

    pid = _Word("Process that owns the segment, or owned it last.")
    start_ticks = _Word("When that process started, in ticks since boot: tells it from a later one.")
    launcher_pid = _Word("Process that launched the owner, and would restart it; -1: it was gone.")
    launcher_start_ticks = _Word("When the launcher started.")
    generation = _Word("Generation of workers that the owner belongs to.")
    step_finished = _Word("Training steps done.")
    update_begun = _Word("Number of the last step (from 1) in which table rows began to change; -1: none.")
    slot = _Word("Replica slot that is whole and newest; -1: none.")
    epoch = _Word("Epoch of the directory's ownership under which the memory was trained; 0: none.")
    heartbeat_ns = _Word("Last heartbeat, `time.time_ns()`.")
    left_ns = _Word("When the owner left by itself, `time.time_ns()`; -1: it did not.")
    stopped_in = _Word("Generation whose owner left for good, as restarts cannot help; -1: none did.")

    def __init__(self, path: Path) -> None:
        with reading(path):
            file = open_private(path, os.O_RDWR | os.O_CREAT)
            try:
                is_new = os.fstat(file).st_size == 0
                if is_new:
                    allocate(file, path, PAGE_BYTES)
                _check_header(file, path)
                self._page = mmap.mmap(file, PAGE_BYTES)
            finally:
                os.close(file)
        self._words = memoryview(self._page)[:REASON_AT].cast("q")
        if is_new:
            self._initialise()
        if (found := (self._words[0], self._words[1])) != (MAGIC, VERSION):
            raise DamagedMemoryError(f"{path} begins with {found} instead of {(MAGIC, VERSION)}")
        if not 0 <= self._words[WORDS.index("reason_bytes")] <= REASON_BYTES:
            raise DamagedMemoryError(f"{path} has an impossible length of its reason")

    def begin(self, generation: int) -> None:
        """Record this process as the owner, and clear how the last owner ended.

        If it left for good, that stays true, and the reason stays.
        """
        this = Process.this()
        self.pid, self.start_ticks = this.pid, this.start_ticks
        launcher = launcher_of_this_worker() or Process(NOTHING, NOTHING)
        self.launcher_pid, self.launcher_start_ticks = launcher.pid, launcher.start_ticks
        self.generation = generation
        self.left_ns = NOTHING
        if not self.has_stopped:
            self.reason = ""
        self.beat()

    def beat(self) -> None:
        """Record a heartbeat."""
        self.heartbeat_ns = time.time_ns()

    def leave(self, reason: str, for_good: bool = False) -> None:
        """Record that the owner ends by itself; `for_good`: restarted workers would end the same way.

        The reason is cut off after 500 bytes; that of the first owner who left for good is never replaced.
        """
        if not self.has_stopped:
            self.reason = reason
            if for_good:
                self.stopped_in = self.generation
        self.left_ns = time.time_ns()

    @property
    def has_stopped(self) -> bool:
        """Whether an owner left for good."""
        return bool(self.stopped_in != NOTHING)

    @property
    def reason(self) -> str:
        """Why the owner left; empty if it was killed."""
        count = self._words[WORDS.index("reason_bytes")]
        return self._page[REASON_AT : REASON_AT + count].decode(errors="replace")

    @reason.setter
    def reason(self, text: str) -> None:
        data = text.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore").encode()
        self._words[WORDS.index("reason_bytes")] = 0
        self._page[REASON_AT : REASON_AT + len(data)] = data
        self._words[WORDS.index("reason_bytes")] = len(data)

    def _initialise(self) -> None:
        for place in range(2, len(WORDS) - 1):
            self._words[place] = NOTHING
        self.step_finished = self.epoch = 0
        self._words[1] = VERSION
        self._words[0] = MAGIC  # last: without it the page does not count


def _check_header(file: int, path: Path) -> None:
    """Check size and version of an open file."""
    magic, version = struct.unpack("qq", os.pread(file, 16, 0).ljust(16, b"\0"))
    if magic == MAGIC and version != VERSION:
        raise other_version(path, version, VERSION)
    if (num_bytes := os.fstat(file).st_size) != PAGE_BYTES:
        raise DamagedMemoryError(f"{path} has {num_bytes} bytes instead of {PAGE_BYTES}")
