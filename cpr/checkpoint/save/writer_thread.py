"""The background half of saving: one thread a rank that turns pieces into files, and files into a fact.

All ranks run the same saves in the same order. Each writes its own files, then they tell each other how it
went, and rank 0 commits the manifest if it went well everywhere: a failure on any rank fails the save on all.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from cpr.checkpoint.catalog.committer import Committer
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.manifest import Kind, Manifest, Moment, Parent, save_folder
from cpr.checkpoint.format.part import Part, merge_tables
from cpr.checkpoint.save.niceness import give_way
from cpr.checkpoint.save.rank_writer import PartWriter
from cpr.checkpoint.save.snapshot import Piece
from cpr.checkpoint.save.staging import StagingPool
from cpr.checkpoint.state.model_state import States
from cpr.checkpoint.storage.base import Storage
from cpr.errors import (
    CheckpointError,
    SaveFailedError,
    SaveGivenUpError,
    SaveRefusedError,
    SupersededError,
)

logger = logging.getLogger(__name__)


class Save:
    """A save that is under way, or over.

    Args:
        kind: `base` or `rows`.
        moment: of the rows in it.
        codec: of the weights.
    """

    def __init__(self, kind: Kind, moment: Moment, codec: str) -> None:
        self.kind, self.moment, self.codec = kind, moment, codec
        self.blocked_s = 0.0
        """Time that training on this rank has waited for it: in calls of the checkpointer, and before rows
        changed that were still to be copied."""
        self.longest_blocked_s = 0.0
        """The same of the rank where it is longest, when it was committed; 0 before."""
        self.seconds: float | None = None
        """From when it was asked for until it counted; None before, and if it failed."""
        self.manifest: Manifest | None = None
        """What was committed; None before, and if it failed."""
        self.error: SaveFailedError | None = None
        """Why it failed."""
        self.is_out_of_time = False
        """Whether this rank could not copy everything in the time that it was given."""
        self.is_refused = False
        """Whether a newer run owns the directory."""
        self.is_excused = False
        """Whether training need not hear of its failure: it was given up in time, or that was told before."""
        self.broken = threading.Event()
        """Set when this rank cannot write any more, so that copying may stop."""
        self._began = time.perf_counter()
        self._settled = threading.Event()
        self._over = threading.Event()
        self._feed: queue.SimpleQueue[Piece | States | str] = queue.SimpleQueue()

    @property
    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._settled.is_set()

    @property
    def outcome(self) -> bool | SaveFailedError:
        """What this rank knows: whether it is committed, or why it failed."""
        if self.manifest is None and self.error is not None and not self.is_excused:
            return self.error
        return self.manifest is not None

    @property
    def is_over(self) -> bool:
        """Whether the background has also merged and cleared away what was due after it."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; whether it is."""
        return self._settled.wait(timeout_s)

    def wait_until_over(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over; whether it is."""
        return self._over.wait(timeout_s)

    def feed(self, item: Piece | States) -> None:
        """Hand over the next piece; `States` are the last."""
        self._feed.put(item)

    def feed_all(self, pieces: list[Piece]) -> None:
        """Hand over pieces, and empty the list."""
        while pieces:
            self._feed.put(pieces.pop(0))

    def cancel(self, problem: str) -> None:
        """Nothing more will come, and the save must not count."""
        self._feed.put(problem)

    def take(self) -> Piece | States | str:
        """The next item; a text says why nothing more will come."""
        return self._feed.get()

    def commit(self, manifest: Manifest, longest_blocked_s: float) -> None:
        """It counts."""
        self.seconds = time.perf_counter() - self._began
        self.longest_blocked_s = longest_blocked_s
        self.manifest = manifest
        self._settled.set()

    def finish(self, error: SaveFailedError | None) -> None:
        """It is over; with an error if it failed, or what was due after it."""
        self.is_excused |= isinstance(error, SaveGivenUpError)
        self.error = error
        self._settled.set()
        self._over.set()


class WriterThread:
    """Runs saves one after the other in a thread of its own.

    Args:
        storage: of the checkpoint.
        pool: where pieces come from, and go back to.
        group: of the ranks; used by the thread alone from now on.
        history: the saves that exist; changed by the thread alone from now on.
    """

    def __init__(
        self,
        storage: Storage,
        pool: StagingPool,
        group: RankGroup,
        history: Committer,
    ) -> None:
        self._storage, self._pool, self._group, self._history = storage, pool, group, history
        self._queue: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
        self._thread.start()

    def start(self, save: Save) -> None:
        """Run a save; its pieces follow."""
        self._queue.put(save)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was started, then end the thread; whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        give_way()
        while (save := self._queue.get()) is not None:
            failure: SaveFailedError | None = None
            try:
                self._commit(save)
                self._history.tidy()
            except SaveGivenUpError as error:
                failure = error
                if self._group.rank == 0:
                    logger.info("%s", error)
            except SaveFailedError as error:
                failure = SaveRefusedError(str(error)) if save.is_refused else error
            except Exception as error:  # whatever it is, training must hear of it
                failure = _lost_touch(error)
            save.finish(failure)

    def _commit(self, save: Save) -> None:
        began = time.perf_counter()
        manifest, longest_blocked_s = self._save(save)
        save.commit(manifest, longest_blocked_s)
        if self._group.rank == 0:
            logger.info(
                "saved %s %d: %.1f MB at step %d in %.2f s",
                manifest.kind,
                manifest.sequence,
                manifest.num_bytes / 1e6,
                manifest.step,
                time.perf_counter() - began,
            )

    def _save(self, save: Save) -> tuple[Manifest, float]:
        """What counts from now on, and how long training waited for it on the rank where it did longest."""
        sequence = self._history.next_sequence
        problem = None
        try:
            self._history.check_lock()
        except Exception as error:
            problem = describe(error)
            save.is_refused = isinstance(error, SupersededError)
            save.broken.set()
        folder = save_folder(sequence, self._history.epoch)
        writer = PartWriter(self._storage, folder, save.codec, with_ids=save.kind == "rows")
        states, problem = self._write_all(save, writer, problem)
        part = Part()
        if states is not None and problem is None:
            try:
                part = writer.finish(states.tables)
            except Exception as error:
                problem = describe(error)
        chain = self._history.chain

        def manifest_of(parts: Sequence[Part]) -> Manifest:
            newest = chain[-1] if save.kind == "rows" else None
            return Manifest(
                run_id=self._history.run_id,
                sequence=sequence,
                epoch=self._history.epoch,
                kind=save.kind,
                parent=Parent(sequence=newest.sequence, digest=newest.file_digest) if newest else None,
                base=chain[0].sequence if newest else sequence,
                moment=save.moment,
                step=states.step if states else 0,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=self._group.world_size,
                tables=merge_tables(parts),
                rows=tuple(entry for part in parts for entry in part.rows),
                states=tuple(entry for part in parts for entry in part.states),
            )

        return self._history.commit(
            sequence, save.kind, part, problem, manifest_of, save.blocked_s, save.is_out_of_time
        )

    def _write_all(
        self, save: Save, writer: PartWriter, problem: str | None
    ) -> tuple[States | None, str | None]:
        """Take all that is fed, whatever happens, so that every buffer comes back; end and problem."""
        while True:
            item = save.take()
            if isinstance(item, str):
                writer.abandon()
                return None, problem or item
            try:
                if problem is None:
                    if isinstance(item, Piece):
                        writer.write(item.shard.extent, item.rows, item.step)
                    else:
                        self._write_states(writer, item)
            except Exception as error:
                problem = describe(error)
                save.broken.set()
                writer.abandon()
            finally:
                if isinstance(item, Piece):
                    self._pool.release(item.buffer)
            if isinstance(item, States):
                return item, problem

    def _write_states(self, writer: PartWriter, states: States) -> None:
        if states.common is not None:
            writer.write_state(states.common, None)
        if states.own is not None:
            writer.write_state(states.own, self._group.rank)


def describe(error: BaseException) -> str:
    """What went wrong, for the message of a `SaveFailedError`."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _lost_touch(error: BaseException) -> SaveFailedError:
    return SaveFailedError(f"a save could not be finished ({describe(error)}); look at the log of all ranks")
