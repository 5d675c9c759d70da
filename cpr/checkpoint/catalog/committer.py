"""The saves of a directory as the ranks that write it know them: committing, merging, clearing away.

Every method is called by all ranks together, in the background thread that runs their saves.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.compaction import Layer, merge_row_files
from cpr.checkpoint.catalog.resolve import on_rank_0
from cpr.checkpoint.catalog.retention import Retention, delete_save
from cpr.checkpoint.catalog.verify import FileEntry, verify_files
from cpr.checkpoint.collectives import RankGroup, shareable
from cpr.checkpoint.format.manifest import Kind, Manifest, StateFileEntry, save_folder
from cpr.checkpoint.format.part import Part
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.storage.base import Storage
from cpr.checkpoint.storage.sinks import HashingSink
from cpr.errors import CheckpointError, CorruptFileError, LockedError, SaveFailedError, SaveGivenUpError
from cpr.extent import Extent

logger = logging.getLogger(__name__)

COPY_BYTES: Final = 8 * 2**20


@dataclass(frozen=True)
class _Answer:
    """How a rank's part of a save went; see `Committer.commit`."""

    sequence: int
    kind: Kind
    part: Part
    problem: str | None
    blocked_s: float
    is_out_of_time: bool


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What becomes of a save, as rank 0 tells the others."""

    manifest: Manifest | None
    """Without the entries of chunks."""
    problems: Sequence[str]
    """Why it does not count; none: it does."""
    blocked_s: float
    """The longest that training waited for it on any rank."""
    is_out_of_time: bool
    """Whether some rank was given too little time."""


@dataclass(kw_only=True)
class Committer:
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
    """All saves of this run that count, oldest first; rank 0 alone knows the entries of their chunks."""
    chain: list[Manifest]
    """The base and the row saves that the next row save builds on; likewise."""

    def __post_init__(self) -> None:
        if self.group.rank:
            self.committed = [manifest.without_chunks() for manifest in self.committed]
            self.chain = [manifest.without_chunks() for manifest in self.chain]

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
            manifest_of: the manifest from the parts of all ranks, in order; called on rank 0.
            blocked_s: that training on this rank waited for it; all is copied by now.
            is_out_of_time: whether the problem is that this rank was given too little time.

        Returns:
            The manifest, on ranks other than 0 without the entries of chunks, and the longest that training
            waited on any rank.

        Raises:
            SaveGivenUpError: it does not count, because some rank was given too little time.
            SaveFailedError: it does not count; says what happened on which rank.
        """
        self.next_sequence = sequence + 1
        answers = self.group.collect(_Answer(sequence, kind, part, problem, blocked_s, is_out_of_time))
        made: Manifest | None = None

        def judge() -> _Verdict:
            nonlocal made
            assert answers is not None
            made, problems = self._write_if_fine(sequence, answers, manifest_of)
            return _Verdict(
                manifest=None if made is None else self._told(made),
                problems=problems,
                blocked_s=max(answer.blocked_s for answer in answers),
                is_out_of_time=any(answer.is_out_of_time for answer in answers),
            )

        verdict = on_rank_0(self.group, judge)
        manifest = made or verdict.manifest
        if verdict.problems or manifest is None:
            last = f"save {self.committed[-1].sequence}" if self.committed else "nothing"
            kind_of_error = SaveGivenUpError if verdict.is_out_of_time else SaveFailedError
            raise kind_of_error(
                f"save {sequence} to {self.storage.uri} failed on {'; '.join(verdict.problems)}. "
                f"It does not count; {last} is the newest that does"
            )
        self.committed.append(manifest)
        self.chain = [manifest] if manifest.kind == "base" else [*self.chain, manifest]
        return manifest, verdict.blocked_s

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
        self.chain = [manifest.without_chunks() if self.group.rank else manifest for manifest in state.saves]
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in rejected]

    def _merge(self) -> None:
        sequence, chain = self.next_sequence, self.chain
        part = Part()
        problem: Exception | None = None
        work = self.group.deal(self._deal_merging())
        try:
            self._write_merged(sequence, work, part)
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

    def _deal_merging(self) -> list[list[list[Layer]]] | None:
        """For each rank, the files of each shard that it merges, oldest first; None on ranks other than 0."""
        if self.group.rank:
            return None
        layers: dict[Extent, list[Layer]] = {entry.extent: [] for entry in self.chain[0].rows}
        for manifest in self.chain:
            for entry in manifest.rows:
                if (place := entry.extent) in layers:
                    layers[place].append((manifest.folder, entry))
        world_size = self.group.world_size
        return [[layers[place] for place in sorted(layers)[rank::world_size]] for rank in range(world_size)]

    def _write_merged(self, sequence: int, work: list[list[Layer]], part: Part) -> None:
        rank, world_size = self.group.rank, self.group.world_size
        folder, newest = save_folder(sequence, self.epoch), self.chain[-1]
        for layers in work:
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
        problem: Exception | None = None
        work = self.group.deal(self._deal_files())
        try:
            for manifest, entries in zip(self.chain, work, strict=True):
                verify_files(self.storage, manifest, entries)
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

    def _deal_files(self) -> list[list[list[FileEntry]]] | None:
        """For each rank, files of each save of the chain that it reads; None on ranks other than 0."""
        if self.group.rank:
            return None
        files: list[list[FileEntry]] = [[*manifest.rows, *manifest.states] for manifest in self.chain]
        world_size = self.group.world_size
        return [[entries[rank::world_size] for entries in files] for rank in range(world_size)]

    def _give_up_chain(self) -> None:
        """It is damaged: nothing may build on it, and older saves are not deleted on its account."""
        bad = {manifest.sequence for manifest in self.chain}
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in bad]
        self.chain = []

    def _write_if_fine(
        self, sequence: int, answers: Sequence[_Answer], manifest_of: Callable[[Sequence[Part]], Manifest]
    ) -> tuple[Manifest | None, list[str]]:
        """Commit what all ranks have written; what is durable now, and why it does not count all the same."""
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(answers) if each.problem]
        if len({(each.sequence, each.kind) for each in answers}) > 1:
            problems.append(
                "all ranks: they are not at the same save; call the checkpointer alike on all ranks"
            )
        manifest = None
        if not problems:
            manifest, problems = self._write_manifest([each.part for each in answers], manifest_of)
        if manifest is None:  # else a newer owner may have found it, and build on it
            self._sweep(save_folder(sequence, self.epoch))
        return manifest, problems

    def _told(self, manifest: Manifest) -> Manifest:
        """What other ranks hear of a save: nothing of its chunks, of which there may be millions."""
        return manifest if self.group.world_size == 1 else manifest.without_chunks()

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
