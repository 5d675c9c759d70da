"""How all ranks of a run take their checkpoint directory together, or go on for a while without it."""

import time
import uuid
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, TypeVar

from cpr.checkpoint.catalog.chain import committed
from cpr.checkpoint.catalog.resolve import on_rank_0
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.ownership.records import Claimant, Owner, newest_owner
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError, CorruptFileError, LockedError, MismatchError

READING_PATIENCE_S: Final = 60.0
"""How long a beginning waits for storage that cannot be read: a short outage must not use up restarts."""
LONGEST_PAUSE_S: Final = 5.0

T = TypeVar("T")


class Ownership:
    """The directory of a run, taken or not yet. Its methods are called by all ranks, but for `check`.

    Args:
        storage: the checkpoint directory.
        group: all ranks.
        claimant: whose workers these are.
    """

    def __init__(self, storage: Storage, group: RankGroup, claimant: Claimant) -> None:
        self._storage, self._group, self._claimant = storage, group, claimant
        self.lock: DirectoryLock | None = None
        """Held by rank 0."""
        self.epoch = 0
        """Of this ownership; 0 before `claim`."""
        self.run_id = ""
        """New with each `claim`."""
        self.previous: Owner | None = None
        """Whoever owned the directory before."""
        self._has_looked = False
        self._noting: Callable[[DirectoryLock], None] = lambda lock: None

    def claim(self) -> None:
        """Take the directory, which keeps others out; once.

        Raises:
            LockedError: another run that is alive owns it, or has owned it since `look`.
            CheckpointError: it cannot be written to.
        """
        if self.epoch:
            return
        run_id, known_epoch = uuid.uuid4().hex, self.previous.epoch if self.previous is not None else 0

        def take() -> tuple[int, Owner | None]:
            lock = DirectoryLock(self._storage, run_id, claimant=self._claimant)
            lock.acquire(partial(committed, self._storage))
            if self._has_looked and lock.previous is not None and lock.previous.epoch != known_epoch:
                lock.release()
                raise LockedError(
                    f"{lock.previous} has owned {self._storage.uri} while this run could not write to it, so "
                    "what this run has trained since belongs to no save there. What to do: stop one of the "
                    "two, or name another directory"
                )
            self._noting(lock)
            self.lock = lock
            return lock.epoch, lock.previous

        self.epoch, self.previous = on_rank_0(self._group, take)
        self.run_id = run_id

    def look(self) -> None:
        """See who owned the directory last, where it cannot be taken yet; `claim` may follow later.

        Raises:
            CheckpointError: it cannot be read.
        """
        self.previous = self.last_owner()
        self._has_looked = True

    def last_owner(self) -> Owner | None:
        """Who owns the directory now, or did last.

        Raises:
            CheckpointError: it cannot be read.
        """
        return on_rank_0(self._group, patiently(partial(newest_owner, self._storage)))

    def note_launches(self, launches: Collection[str], *, continues: bool) -> None:
        """Record that saves here are of these launches from now on: their workers have begun.

        Where the directory is not taken yet, that is done when it is. See `DirectoryLock.note_launches`.

        Raises:
            CheckpointError: the directory cannot be written to.
        """
        self._noting = partial(DirectoryLock.note_launches, launches=launches, continues=continues)
        on_rank_0(self._group, lambda: self._noting(self.lock) if self.lock is not None else None)

    def check(self) -> int:
        """Make sure that the directory is this run's; on rank 0, in any thread.

        Returns:
            The epoch.

        Raises:
            LockedError: another run has taken it over.
            CheckpointError: it is not taken yet, or cannot be read.
        """
        if self.lock is None:
            raise CheckpointError(f"{self._storage.uri} is not taken yet; the next save tries that again")
        self.lock.check()
        return self.epoch

    def finish(self, steps_done: int) -> None:
        """Record that the run has reached its end, at this step; durable when it returns.

        Raises:
            LockedError: another run has taken the directory over.
            CheckpointError: it cannot be written to.
        """
        on_rank_0(self._group, lambda: self.lock.finish(steps_done) if self.lock is not None else None)

    def release(self) -> None:
        """Let go of it; not collective."""
        if self.lock is not None:
            self.lock.release()


def patiently(read: Callable[[], T]) -> Callable[[], T]:
    """The same call, tried again with growing pauses while storage fails; what is wrong for good raises."""

    def call() -> T:
        deadline, pause_s = time.monotonic() + READING_PATIENCE_S, 0.1
        while True:
            try:
                return read()
            except (CorruptFileError, LockedError, MismatchError):
                raise
            except CheckpointError:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    return call
