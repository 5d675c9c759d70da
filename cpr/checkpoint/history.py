"""The saves of a directory as the ranks that write it know them: committing, merging, clearing away.

Every method is called by all ranks together, in the background thread that runs their saves.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cpr.checkpoint.chain import State
from cpr.checkpoint.lock import DirectoryLock
from cpr.checkpoint.manifest import Kind, Manifest, StateFileEntry, save_folder
from cpr.checkpoint.merge import merge_row_files
from cpr.checkpoint.opening import on_rank_0
from cpr.checkpoint.part import Part
from cpr.checkpoint.ranks import RankGroup, shareable
from cpr.checkpoint.retention import Retention, delete_save
from cpr.checkpoint.row_schema import place_of
from cpr.checkpoint.sinks import HashingSink
from cpr.checkpoint.storage import Storage
from cpr.checkpoint.verify import FileEntry, verify_files
from cpr.errors import CheckpointError, CorruptFileError, LockedError, SaveFailedError, SaveGivenUpError

logger = logging.getLogger(__name__)

COPY_BYTES: Final = 8 * 2**20


@dataclass(kw_only=True)
class History:
    """What is committed, and what comes next."""

    storage: Storage
    group: RankGroup
    lock: DirectoryLock | None
    """Held by rank 0."""
    retention: Retention
    merge_after: int
    """Merge a chain into a new base when it has more row saves than this; 0: never."""
    run_id: str
    epoch: int
    """Of this run's ownership of the directory."""
    next_sequence: int
    committed: list[Manifest]
    """All saves of this run that count, oldest first."""
    chain: list[Manifest]
    """The base and the row saves that the next row save builds on."""

    def check_lock(self) -> None:
        """Make sure that the directory is still this run's; before anything is written or deleted.

        Raises:
            LockedError: another run has taken it over.
        """
        on_rank_0(self.group, self._check_lock_here)

    def commit(
        self,
        sequence: int,
        kind: Kind,
        part: Part,
        problem: str | None,
        manifest_of: Callable[[Sequence[Part]], Manifest],
        blocked_s: float = 0.0,
        is_out_of_time: bool = False,
    ) -> tuple[Manifest, float]:
        """Make a save count, if every rank has written its part.

        Args:
            sequence: of the save.
            kind: of the save; all ranks must be at the same one.
            part: what this rank has written.
            problem: why it could not.
            manifest_of: the manifest from the parts of all ranks, in order.
            blocked_s: that training on this rank waited for it; all is copied by now.
            is_out_of_time: whether the problem is that this rank was given too little time.

        Returns:
            The manifest, and the longest that training waited on any rank.

        Raises:
            SaveGivenUpError: it does not count, because some rank was given too little time.
            SaveFailedError: it does not count; says what happened on which rank.
        """
        self.next_sequence = sequence + 1
        answers = self.group.gather((sequence, kind, part, problem, blocked_s, is_out_of_time))
        problems = [f"rank {rank}: {text}" for rank, (_, _, _, text, *_) in enumerate(answers) if text]
        if len({answer[:2] for answer in answers}) > 1:
            problems.append(
                "all ranks: they are not at the same save; call the checkpointer alike on all ranks"
            )
        manifest = None
        if self.group.rank == 0:
            if not problems:
                manifest, problems = self._write_manifest([part for _, _, part, *_ in answers], manifest_of)
            if manifest is None:  # else a newer owner may have found it, and build on it
                self._sweep(save_folder(sequence, self.epoch))
        manifest, problems = self.group.broadcast((manifest, problems))
        if problems or manifest is None:
            last = f"save {self.committed[-1].sequence}" if self.committed else "nothing"
            kind_of_error = SaveGivenUpError if any(answer[-1] for answer in answers) else SaveFailedError
            raise kind_of_error(
                f"save {sequence} to {self.storage.uri} failed on {'; '.join(problems)}. "
                f"It does not count; {last} is the newest that does"
            )
        self.committed.append(manifest)
        self.chain = [manifest] if manifest.kind == "base" else [*self.chain, manifest]
        return manifest, max(waited_s for *_, waited_s, _ in answers)

    def tidy(self) -> None:
        """Merge a chain that has grown long; delete what the retention policy does not keep.

        Raises:
            SaveFailedError: the merged base could not be written, or the newest state does not verify. If
                that is because the chain is damaged, the next save must be a base.
        """
        if self.merge_after and len(self.chain) - 1 > self.merge_after:
            self._merge()
        doomed = self.retention.doomed(self.committed)
        if not doomed:
            return
        self._verify_newest()
        # others wait here, and not in training
        gone = on_rank_0(self.group, lambda: self._delete_all(doomed))
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in gone]

    def go_back_to(self, state: State, rejected: Collection[int]) -> None:
        """Build on a state that was just loaded; no save is under way.

        Args:
            state: of this run.
            rejected: sequences of saves that could not be loaded; they count no more, and are not deleted.
        """
        self.chain = list(state.saves)
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in rejected]

    def _merge(self) -> None:
        sequence, chain = self.next_sequence, self.chain
        part = Part()
        problem: Exception | None = None
        try:
            self._write_merged(sequence, part)
        except Exception as error:
            problem = error
        if any(self.group.gather(isinstance(problem, CorruptFileError))):
            self._give_up_chain()
        self.commit(
            sequence,
            "base",
            part,
            None if problem is None else str(problem),
            lambda parts: replace(
                chain[-1],
                sequence=sequence,
                epoch=self.epoch,
                kind="base",
                parent=None,
                base=sequence,
                moment="rolling",
                rows=tuple(entry for part in parts for entry in part.rows),
                states=tuple(entry for part in parts for entry in part.states),
                merged=tuple(manifest.sequence for manifest in chain),
            ),
        )

    def _write_merged(self, sequence: int, part: Part) -> None:
        rank, world_size = self.group.rank, self.group.world_size
        folder, newest = save_folder(sequence, self.epoch), self.chain[-1]
        for place in sorted({place_of(entry) for entry in self.chain[0].rows})[rank::world_size]:
            layers = [
                (manifest.folder, entry)
                for manifest in self.chain
                for entry in manifest.rows
                if place_of(entry) == place
            ]
            path = layers[0][1].path
            with self.storage.create(f"{folder}/{path}") as sink:
                part.rows.append(merge_row_files(self.storage, layers, sink, path))
        for state in newest.states[rank::world_size]:
            self._copy(f"{newest.folder}/{state.path}", f"{folder}/{state.path}", state)
            part.states.append(state)

    def _copy(self, source: str, target: str, entry: StateFileEntry) -> None:
        buffer = memoryview(bytearray(min(COPY_BYTES, entry.num_bytes)))
        with self.storage.create(target) as file:
            sink = HashingSink(file)
            for offset in range(0, entry.num_bytes, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, entry.num_bytes - offset)]
                self.storage.read_into(source, offset, piece)
                sink.write(piece)
            if sink.digest() != entry.digest:
                raise CorruptFileError(f"{source} differs from its digest in the manifest: it is damaged")

    def _verify_newest(self) -> None:
        """Read the newest state again before anything older goes."""
        rank, world_size = self.group.rank, self.group.world_size
        problem: Exception | None = None
        try:
            for manifest in self.chain:
                entries: list[FileEntry] = [*manifest.rows, *manifest.states]
                verify_files(self.storage, manifest, entries[rank::world_size])
        except Exception as error:  # the others wait to hear of it
            problem = shareable(error)
        problems = [found for found in self.group.gather(problem) if found is not None]
        if not problems:
            return
        advice = "the next save looks again"
        if any(isinstance(found, CorruptFileError) for found in problems):
            self._give_up_chain()
            advice = "save a new base, look at the storage"
        raise SaveFailedError(f"{'; '.join(map(str, problems))}. Older saves are kept; {advice}")

    def _give_up_chain(self) -> None:
        """It is damaged: nothing may build on it, and older saves are not deleted on its account."""
        bad = {manifest.sequence for manifest in self.chain}
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in bad]
        self.chain = []

    def _write_manifest(
        self, parts: Sequence[Part], manifest_of: Callable[[Sequence[Part]], Manifest]
    ) -> tuple[Manifest | None, list[str]]:
        """What is durable now, and why it does not count all the same; None: nothing is."""
        manifest = None
        try:
            made = manifest_of(parts)
            made.check()  # or nobody could load it
            self._check_lock_here()
            with self.storage.create(made.path) as sink:
                sink.write(memoryview(made.to_json()))
            manifest = made
            # A newer owner that came before this was durable may not have found it: then it does not count.
            self._check_lock_here()
        except Exception as error:
            return manifest, [f"rank 0: {error}"]
        return manifest, []

    def _sweep(self, folder: str) -> None:
        """Delete what a save without a manifest has written: in a folder that is this owner's alone."""
        try:
            delete_save(self.storage, folder)
        except Exception as error:  # the others wait to hear why the save failed
            logger.warning("could not delete what a failed save left in %s: %s", folder, error)

    def _delete_all(self, sequences: Sequence[int]) -> set[int]:
        """Those that are gone. Of a chain in which one cannot be deleted, what it lies on stays, too."""
        saves = {manifest.sequence: manifest for manifest in self.committed}
        stuck: set[int] = set()
        gone: set[int] = set()
        for sequence in sequences:
            save = saves[sequence]
            if save.base in stuck:
                continue
            if self._delete(save):
                gone.add(sequence)
            else:
                stuck.add(save.base)
        return gone

    def _delete(self, save: Manifest) -> bool:
        try:
            self._check_lock_here()
            delete_save(self.storage, save.folder)
        except LockedError:
            raise
        except CheckpointError as error:
            logger.warning("could not delete save %d: %s", save.sequence, error)
            return False
        return True

    def _check_lock_here(self) -> None:
        if self.lock is not None:
            self.lock.check()
