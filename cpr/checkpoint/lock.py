"""One run writes to a directory: its owner renews a LOCK file, which a dead owner does not hold for ever.

The file says which process holds it. A newcomer on the same machine looks whether that process lives. From
anywhere else it watches whether the file still changes: only its own clock counts, never a comparison of two
machines' clocks. Whoever takes over writes its own token; an owner that was merely asleep finds it there
before it commits anything (`check`). Generations of workers of one session need not watch: when they met,
they agreed that the generation before is over, and the next takes the lock at once, whatever machine had it.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from cpr.checkpoint.storage import Storage, read_file
from cpr.errors import CheckpointError, CorruptFileError, LockedError
from cpr.processes import Process

LOCK_PATH: Final = "LOCK"
LOCK_BYTES: Final = 1024
"""Always the same, so that a reader never meets half of a longer version."""
BEATS_PER_PATIENCE: Final = 10
SETTLE_S: Final = 1.0
"""Where storage cannot keep others out: what a newcomer waits after writing, for one that looked before that
to write as well; the last one stays."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What the LOCK file says."""

    owner: str
    """Run id."""
    token: str
    """Of this acquisition."""
    host: str
    place: str
    """Boot id and process id namespace: where `pid` means something."""
    pid: int
    started: int
    """When the process started, in the kernel's ticks: tells it from a later one of the same number."""
    beat: int
    """Goes up by one at each renewal."""
    beat_s: float
    """Seconds between renewals."""
    session: str = ""
    """Whose generations of workers hand the lock on; empty: nobody's."""

    def __str__(self) -> str:
        return f"run {self.owner!r} (process {self.pid} on {self.host})"

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return (json.dumps(asdict(self)).ljust(LOCK_BYTES - 1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Holder | None":
        """Read one back; None when it was not written by this program."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None


class DirectoryLock:
    """The right to write to a storage, for one run.

    Args:
        storage: a checkpoint directory.
        owner: run id, for people.
        patience: how long the file of an owner on another machine may stay unchanged before that owner counts
            as dead. The lock is renewed ten times as often.
        session: of workers that follow each other; one of them that is here is the last one's successor.

    Raises:
        ValueError: the run id is too long.
    """

    def __init__(
        self,
        storage: Storage,
        owner: str,
        patience: timedelta = timedelta(seconds=60),
        *,
        session: str = "",
    ) -> None:
        if len(json.dumps(owner)) > LOCK_BYTES // 2:
            raise ValueError(f"the run id {owner[:40]}... is too long: at most {LOCK_BYTES // 2} characters")
        self._storage = storage
        self._owner = owner
        self._session = session
        self._patience_s = patience.total_seconds()
        self._beat_s = self._patience_s / BEATS_PER_PATIENCE
        self._token = ""
        self._beat = 0
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, from a dead owner if need be, and keep it renewed.

        At most about `patience` long, and only if the last owner was on another machine.

        Raises:
            LockedError: another run holds it and is alive.
            CheckpointError: the directory cannot be read or written.
        """
        self._token = secrets.token_hex(8)
        while not self._try_to_acquire():
            pass
        self._released.clear()
        self._thread = threading.Thread(target=self._renew, name="cpr-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Call before anything is committed.

        Raises:
            LockedError: somebody took the lock over; nothing may be written any more.
            CheckpointError: the directory cannot be read.
        """
        holder = Holder.from_bytes(self._read() or b"")
        if holder is None or holder.token != self._token:
            raise LockedError(
                f"{self._storage.uri} no longer belongs to run {self._owner!r}: {holder or 'nobody'} holds "
                f"its {LOCK_PATH} now, because this process was asleep for too long or the file was deleted. "
                "Nothing more is saved there. What to do: stop one of the two, or name another directory"
            )

    def release(self) -> None:
        """Give the lock up, if it is still held."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        try:
            with self._storage.alone():
                self.check()
                self._storage.delete(LOCK_PATH)
        except CheckpointError as error:
            logger.warning("the lock could not be released: %s", error)

    def _try_to_acquire(self) -> bool:
        seen = self._read()
        if seen is not None:
            self._refuse_if_alive(seen)
        with self._storage.alone() as alone:
            if self._read() != seen:
                return False  # another newcomer was faster, or the owner woke up
            self._write()
        if not alone:
            time.sleep(SETTLE_S)
        return Holder.from_bytes(self._read() or b"") == self._holder()

    def _refuse_if_alive(self, seen: bytes) -> None:
        holder = Holder.from_bytes(seen)
        if holder is not None and self._session and holder.session == self._session:
            logger.info("%s is handed on by %s", self._storage.uri, holder)
            return
        if holder is not None and holder.place == _place():
            alive = Process(holder.pid, holder.started).is_alive
        else:
            alive = self._changes(seen, holder.beat_s if holder else 0.0)
        if alive:
            raise LockedError(
                f"{self._storage.uri} is in use by {holder or 'somebody unknown'}. What to do: wait for its "
                f"end or stop it, or name another directory. If it is surely gone, delete {LOCK_PATH} there"
            )
        logger.warning(
            "taking %s over from %s, which is gone", self._storage.uri, holder or "somebody unknown"
        )

    def _changes(self, seen: bytes, beat_s: float) -> bool:
        patience_s = max(self._patience_s, 3 * beat_s)
        logger.info("watching for %.0f s whether the owner of %s is alive", patience_s, self._storage.uri)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            time.sleep(self._beat_s / 2)
            now = self._read()
            if now != seen:
                return now is not None
        return False

    def _renew(self) -> None:
        while not self._released.wait(self._beat_s):
            try:
                with self._storage.alone():
                    self.check()
                    self._write()
            except LockedError:
                return  # whoever wants to commit learns of it
            except CheckpointError as error:
                logger.warning("the lock could not be renewed, will try again: %s", error)

    def _holder(self) -> Holder:
        return Holder(
            owner=self._owner,
            token=self._token,
            host=socket.gethostname(),
            place=_place(),
            pid=os.getpid(),
            started=Process.this().start_ticks,
            beat=self._beat,
            beat_s=self._beat_s,
            session=self._session,
        )

    def _write(self) -> None:
        self._beat += 1
        with self._storage.create(LOCK_PATH) as sink:
            sink.write(memoryview(self._holder().to_bytes()))

    def _read(self) -> bytes | None:
        try:
            return read_file(self._storage, LOCK_PATH)
        except CorruptFileError:
            return None  # not there, or deleted meanwhile


def _place() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
