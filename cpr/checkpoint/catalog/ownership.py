"""Collective ownership of a checkpoint directory: rank 0 holds the lock, all ranks know the epoch."""

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
"""How long a starting run retries storage that cannot be read: a short outage must not use up restarts."""
LONGEST_PAUSE_S: Final = 5.0

T = TypeVar("T")


class Ownership:
    """A run's ownership of its checkpoint directory. All ranks call its methods together, except `check`."""

    def __init__(self, storage: Storage, group: RankGroup, claimant: Claimant) -> None:
        self._storage, self._group, self._claimant = storage, group, claimant
        self.lock: DirectoryLock | None = None
        """The lock on rank 0 after `claim`; else None."""
        self.epoch = 0
        """Epoch of this ownership; 0 before `claim`."""
        self.run_id = ""
        """Random id for a new run, made by `claim`."""
        self.previous: Owner | None = None
        self._has_read_previous = False
        self._note_launches: Callable[[DirectoryLock], None] = lambda lock: None

    def claim(self, takes_finished: Callable[[Owner], bool] = lambda _: True) -> None:
        """Take the directory, so that no other run writes there; later calls do nothing.

        Raises as `DirectoryLock.acquire`; `LockedError`, too, if another run has owned the directory since
        `read_previous_owner`.
        """
        if self.epoch:
            return
        run_id, known_epoch = uuid.uuid4().hex, self.previous.epoch if self.previous is not None else 0

        def take() -> tuple[int, Owner | None]:
            lock = DirectoryLock(
                self._storage, run_id, claimant=self._claimant, takes_finished=takes_finished
            )
            lock.acquire(partial(committed, self._storage))
            if self._has_read_previous and lock.previous is not None and lock.previous.epoch != known_epoch:
                lock.release()
                raise LockedError(
                    f"{lock.previous} has owned {self._storage.uri} while this run could not write to it, so "
                    "what this run has trained since belongs to no save there. What to do: stop one of the "
                    "two, or name another directory"
                )
            self._note_launches(lock)
            self.lock = lock
            return lock.epoch, lock.previous

        self.epoch, self.previous = on_rank_0(self._group, take)
        self.run_id = run_id

    def read_previous_owner(self) -> None:
        """Set `previous` where the directory cannot be taken yet; `claim` may follow later."""
        self.previous = self.last_owner()
        self._has_read_previous = True

    def last_owner(self) -> Owner | None:
        """The present owner of the directory, or the last one."""
        return on_rank_0(self._group, retry_reads(partial(newest_owner, self._storage)))

    def note_launches(self, launches: Collection[str], *, continues: bool) -> None:
        """Record the launches whose workers save here from now on; before `claim`, once that is called.

        See `DirectoryLock.note_launches`.
        """
        self._note_launches = partial(DirectoryLock.note_launches, launches=launches, continues=continues)
        on_rank_0(self._group, lambda: self._note_launches(self.lock) if self.lock is not None else None)

    def check(self) -> int:
        """Return the epoch if the directory still belongs to this run; on rank 0, in any thread.

        Raises as `DirectoryLock.check`; `CheckpointError`, too, if the directory is not taken yet.
        """
        if self.lock is None:
            raise CheckpointError(f"{self._storage.uri} is not taken yet; the next save tries that again")
        self.lock.check()
        return self.epoch

    def finish(self, steps_done: int) -> None:
        """See `DirectoryLock.finish`."""
        on_rank_0(self._group, lambda: self.lock.finish(steps_done) if self.lock is not None else None)

    def release(self) -> None:
        """Release the directory; not collective."""
        if self.lock is not None:
            self.lock.release()


def retry_reads(read: Callable[[], T]) -> Callable[[], T]:
    """Wrap a call to retry it, with growing pauses, while storage fails; other errors are raised."""

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
