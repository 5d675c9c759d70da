"""The lock of a checkpoint directory: the owner of the highest epoch may write, and renews its record.

The record names the owner's process. A new run on the same machine checks whether that process is alive. From
another machine it watches whether the record still changes, by its own clock alone: clocks of two machines
are never compared. A run that takes the directory over takes the next epoch (`ownership.records`); an owner
that was merely paused finds that epoch before it commits or deletes anything (`check`). A new generation of
workers of the same session does not watch: its rendezvous has settled that the previous generation ended, so
it takes the directory at once.
"""

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from cpr.checkpoint.format.manifest import SAVES, numbers_of
from cpr.checkpoint.ownership.records import (
    NO_CLAIMANT,
    Claimant,
    Owner,
    epochs,
    fence,
    newest_owner,
    write_owner,
)
from cpr.checkpoint.storage.base import Storage
from cpr.errors import AlreadyFinishedError, CheckpointError, LockedError, SupersededError
from cpr.processes import Process

BEATS_PER_PATIENCE: Final = 10
LONGEST_RETRY_S: Final = 0.2
"""Upper limit of the random pause after which runs that claim at the same moment try again."""
RIVALS_S: Final = 5.0
"""How long a claiming run waits for concurrent ones to give way."""
PATIENCE: Final = timedelta(seconds=60)

logger = logging.getLogger(__name__)


class DirectoryLock:
    """The exclusive right of one run to write to a checkpoint directory.

    Args:
        storage: the checkpoint directory.
        run: run id, for messages.
        patience: how long the record of an owner on another machine may stay unchanged before that owner
            counts as dead. Records are renewed ten times as often.
        claimant: session and generation of these workers; they succeed older generations at once.
        takes_finished: says whether to take a directory whose last owner has finished its run.
    """

    def __init__(
        self,
        storage: Storage,
        run: str,
        patience: timedelta = PATIENCE,
        *,
        claimant: Claimant = NO_CLAIMANT,
        takes_finished: Callable[[Owner], bool] = lambda _: True,
    ) -> None:
        self._storage, self._claimant, self._takes_finished = storage, claimant, takes_finished
        self._patience_s = patience.total_seconds()
        self._own = Owner(
            epoch=0,
            token=secrets.token_hex(4),
            run=run,
            host=socket.gethostname(),
            place=_place(),
            pid=os.getpid(),
            started=Process.this().start_ticks,
            session=claimant.session,
            generation=claimant.generation,
            beat_s=self._patience_s / BEATS_PER_PATIENCE,
        )
        self.previous: Owner | None = None
        self._writing = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> int:
        """Epoch of this ownership; 0 before `acquire`."""
        return self._own.epoch

    def acquire(self, committed: Callable[[], list[tuple[int, int]]]) -> None:
        """Take the directory, from a dead owner if need be, and renew the record in the background.

        Waits about `patience` at most, and only if the last owner was on another machine. `committed` returns
        sequence and epoch of all saves that count; it is called when no older owner can commit any more.

        Raises:
            AlreadyFinishedError: the run has finished, and `takes_finished` says no; nothing is written.
            LockedError: another live run owns the directory, or was faster.
            CheckpointError: the directory cannot be read or written.
        """
        while not self._take_epoch():
            time.sleep(random.uniform(0, LONGEST_RETRY_S))
        # From here on, an older owner that checks finds this epoch; what it has committed before is listed.
        self._write(accepted=tuple(committed()))
        self.check()
        self._forget_older()
        self._released.clear()
        self._thread = threading.Thread(target=self._renew, name="cpr-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this run still owns the directory: before each commit and deletion, and after a commit.

        Raises:
            SupersededError: another run has taken the directory; nothing may be written any more.
            LockedError: the record of this run is gone, perhaps with the directory.
            CheckpointError: the directory cannot be read.
        """
        if not self._is_recorded():
            raise LockedError(
                f"{self._own.path} is gone from {self._storage.uri}: the directory was removed or replaced, "
                "or its disk is no longer mounted. What to do: put it back; the record of this run is "
                "written again as soon as that is possible"
            )

    def _is_recorded(self) -> bool:
        """Whether this owner's record exists; raises `SupersededError` if a newer owner's does."""
        found = epochs(self._storage)
        own = (self._own.epoch, self._own.token)
        if max(found, default=own)[0] > own[0] or self._is_replaced(found):
            holder = newest_owner(self._storage)
            raise SupersededError(
                f"{self._storage.uri} no longer belongs to run {self._own.run!r}: {holder or 'another run'} "
                f"owns it now (epoch {max(found)[0]}, ours was {own[0]}), because this process was paused "
                "for too long. Nothing more is saved there. What to do: stop one of the two, or name another "
                "directory"
            )
        return own in found

    def _is_replaced(self, found: Sequence[tuple[int, str]]) -> bool:
        """Whether another run owns the same epoch; possible if this owner's record was deleted by hand.

        A record without a list of accepted saves is of a claiming run, which will find this one and give way.
        """
        if all(epoch != self._own.epoch or token == self._own.token for epoch, token in found):
            return False
        owner = fence(self._storage)
        return owner is not None and owner.epoch == self._own.epoch and owner.token != self._own.token

    def finish(self, steps_done: int) -> None:
        """Record that the run finished at this step; durable when this returns. Raises as `check`."""
        self.check()
        self._write(finished=steps_done)

    def note_launches(self, launches: Collection[str], *, continues: bool) -> None:
        """Record the launches whose workers make the saves to come.

        Where they continue the run that saved here, its launches stay recorded.
        """
        noted = tuple(sorted({*launches, *(self._own.launches if continues else ())}))
        if noted != self._own.launches:
            self._write(launches=noted)

    def release(self) -> None:
        """Release the directory if it is still owned."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        try:
            self.check()
            self._write(released=True)
        except CheckpointError as error:
            logger.warning("the directory could not be released: %s", error)

    def _take_epoch(self) -> bool:
        """Write a record of the next epoch; False if another owner has written meanwhile."""
        found = epochs(self._storage)
        self.previous = newest_owner(self._storage)
        if self.previous is not None:
            self._refuse_if_alive(self.previous)
            if newest_owner(self._storage) != self.previous:
                return False  # it may have finished its run while its process was looked for
            if self.previous.finished is not None and not self._takes_finished(self.previous):
                raise AlreadyFinishedError(self.previous.finished)
        # Folders of saves show the epochs of owners whose records were deleted by hand.
        saves = filter(None, map(numbers_of, self._storage.list(SAVES)))
        known = [*(epoch for epoch, _ in found), *(epoch for _, epoch in saves), 0]
        self._write(
            epoch=max(known) + 1,
            launches=() if self.previous is None else self.previous.launches,
            accepted=None,
            released=False,
            finished=None,
        )
        # A run that finds no other record of its epoch owns it: runs that list later find this record. Of
        # several concurrent runs all give way to the lowest token, or else none might ever become the owner.
        own = (self._own.epoch, self._own.token)
        deadline = time.monotonic() + RIVALS_S
        while rivals := [each for each in epochs(self._storage) if each[0] >= own[0] and each != own]:
            if min(rivals) < own or max(rivals)[0] > own[0] or time.monotonic() > deadline:
                self._storage.delete(self._own.path)
                return False
            time.sleep(random.uniform(0, LONGEST_RETRY_S))
        return True

    def _forget_older(self) -> None:
        """Delete the records of older epochs, which this owner's record replaces."""
        try:
            for epoch, token in epochs(self._storage):
                if epoch < self._own.epoch:
                    self._storage.delete(replace(self._own, epoch=epoch, token=token).path)
        except CheckpointError as error:
            logger.warning("older records of owners are left in %s: %s", self._storage.uri, error)

    def _refuse_if_alive(self, holder: Owner) -> None:
        if holder.released or holder.finished is not None:
            return
        ours = self._own
        if ours.session and holder.session == ours.session and holder.generation < ours.generation:
            logger.info("taking %s over from %s of the same session", self._storage.uri, holder)
            return
        if holder.place == ours.place:  # only then its pid means the same process here
            alive = Process(holder.pid, holder.started).is_alive
        else:
            alive = self._changes(holder)
        if alive:
            raise LockedError(
                f"{self._storage.uri} is in use by {holder}. What to do: wait for its end or stop it, or "
                f"name another directory. If it is surely gone, delete {holder.path} there"
            )
        logger.warning("taking %s over from %s, which is gone", self._storage.uri, holder)

    def _changes(self, holder: Owner) -> bool:
        # An owner that renews its record rarely gets more time to show that it is alive.
        patience_s = max(self._patience_s, 3 * holder.beat_s)
        logger.info("watching for %.0f s whether the owner of %s is alive", patience_s, self._storage.uri)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            time.sleep(self._own.beat_s / 2)
            now = newest_owner(self._storage)
            if now != holder:
                return now is not None
        return False

    def _renew(self) -> None:
        has_warned = False
        while not self._released.wait(self._own.beat_s):
            try:
                self._is_recorded()  # raises if another run took over; a missing record is written again
                self._write(beat=self._own.beat + 1)
                has_warned = False
            except SupersededError:
                return  # the next commit raises this error
            except CheckpointError as error:
                if not has_warned:
                    logger.warning("the ownership record could not be renewed, will try again: %s", error)
                has_warned = True

    def _write(self, **changes: object) -> None:
        """Change the record, in the storage first."""
        with self._writing:
            changed = replace(self._own, **changes)  # type: ignore[arg-type]  # fields of the record
            write_owner(self._storage, changed)
            self._own = changed


def _place() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
