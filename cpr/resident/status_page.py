"""A worker's last word: a page of memory with numbers that others read after its death.

Each number is one aligned 8-byte store, so that a kill leaves either the old or the new one.
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
"""Stands for "none yet" in every number that begins without a value."""
WORDS: Final = (
    *("magic", "version", "pid", "start_ticks", "generation", "step_finished", "update_begun", "slot"),
    *("launcher_pid", "launcher_start_ticks", "heartbeat_ns", "left_ns", "diverged_in"),
    *("epoch", "reason_bytes"),
)


class _Word:
    """One number in the page."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = WORDS.index(name)

    def __get__(self, status: Any, owner: type) -> Any:
        return self if status is None else status._words[self._place]

    def __set__(self, status: Any, value: int) -> None:
        status._words[self._place] = value


class StatusPage:
    """What a worker says about itself; live, in shared memory.

    Args:
        path: of the page. It is made, with nothing said, if there is none.

    Raises:
        DamagedMemoryError: the file is no such page.
        UnreadableMemoryError: it cannot be read now, or was written by another version.
    """

    pid = _Word("Process that owns the segment, or owned it last.")
    start_ticks = _Word("When that process started, in ticks since boot: tells it from a later one.")
    launcher_pid = _Word("What started that process and would start it again; -1: it was gone.")
    launcher_start_ticks = _Word("When the launcher started.")
    generation = _Word("Of the process group in which the owner worked.")
    step_finished = _Word("Training steps done.")
    update_begun = _Word("Number of the last step (from 1) in which table rows began to change; -1: none.")
    slot = _Word("Which replica slot is whole and newest; -1: none.")
    epoch = _Word("Of the ownership of the checkpoint directory under which this was trained; 0: none.")
    heartbeat_ns = _Word("Last sign of life, `time.time_ns()`.")
    left_ns = _Word("When the owner left of its own accord, `time.time_ns()`; -1: it did not.")
    diverged_in = _Word("Generation whose owner left because values were no numbers; -1: none did.")

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
        """This process owns the segment from now on; what the last owner said of its end is forgotten.

        Not so if that was that values are no numbers: it stays true, and so does the reason.
        """
        this = Process.this()
        self.pid, self.start_ticks = this.pid, this.start_ticks
        launcher = launcher_of_this_worker() or Process(NOTHING, NOTHING)
        self.launcher_pid, self.launcher_start_ticks = launcher.pid, launcher.start_ticks
        self.generation = generation
        self.left_ns = NOTHING
        if not self.diverged:
            self.reason = ""
        self.beat()

    def beat(self) -> None:
        """A sign of life."""
        self.heartbeat_ns = time.time_ns()

    def leave(self, reason: str, diverged: bool = False) -> None:
        """The owner ends of its own accord.

        Args:
            reason: for people; what is beyond 500 bytes is cut off. Of a segment that holds values that are
                no numbers, the first that said so is kept.
            diverged: values are no numbers; nobody may use them, in this generation or in a later one.
        """
        if not self.diverged:
            self.reason = reason
            if diverged:
                self.diverged_in = self.generation
        self.left_ns = time.time_ns()

    @property
    def diverged(self) -> bool:
        """Whether an owner left because values were no numbers."""
        return bool(self.diverged_in != NOTHING)

    @property
    def reason(self) -> str:
        """Why the owner left; empty when it had no last word."""
        count = self._words[WORDS.index("reason_bytes")]
        return self._page[REASON_AT : REASON_AT + count].decode(errors="replace")

    @reason.setter
    def reason(self, text: str) -> None:
        data = text.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore").encode()
        self._words[WORDS.index("reason_bytes")] = 0
        self._page[REASON_AT : REASON_AT + len(data)] = data
        self._words[WORDS.index("reason_bytes")] = len(data)

    def close(self) -> None:
        """Give the page back; the object is of no use afterwards."""
        self._words.release()
        self._page.close()

    def _initialise(self) -> None:
        for place in range(2, len(WORDS) - 1):
            self._words[place] = NOTHING
        self.step_finished = self.epoch = 0
        self._words[1] = VERSION
        self._words[0] = MAGIC  # last: a page without it does not count


def _check_header(file: int, path: Path) -> None:
    """Whether the open file is a page of this version, as far as its size and version tell."""
    magic, version = struct.unpack("qq", os.pread(file, 16, 0).ljust(16, b"\0"))
    if magic == MAGIC and version != VERSION:
        raise other_version(path, version, VERSION)
    if (num_bytes := os.fstat(file).st_size) != PAGE_BYTES:
        raise DamagedMemoryError(f"{path} has {num_bytes} bytes instead of {PAGE_BYTES}")
