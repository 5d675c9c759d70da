"""Commits saves, compacts long chains and deletes old saves, for the ranks that write to a directory.

All ranks call every method together, in the background thread that writes their saves.

`Retention` chooses which saves are deleted, in an order that is safe to interrupt anywhere. A chain (a base
with all row saves on it) is kept or deleted as a whole and is as old as its newest state. Every policy keeps
the two newest chains, and with them the newest state and all that it needs.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.compaction import Layer, merge_row_files
from cpr.checkpoint.catalog.resolve import on_rank_0
from cpr.checkpoint.catalog.verify import verify_files
from cpr.checkpoint.collectives import RankGroup, attempt_on_all
from cpr.checkpoint.format.manifest import FileEntry, Kind, Manifest, StateFileEntry, save_folder
from cpr.checkpoint.format.part import RankPart
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.storage.base import HashingSink, Storage
from cpr.errors import CheckpointError, CorruptFileError, LockedError, SaveFailedError, SaveGivenUpError
from cpr.extent import Extent
from cpr.fields import check_fields


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Policy for the chains to keep."""

    keep_last: int = 2
    """Number of newest chains to keep; at least 2, so that another is left if one turns out to be damaged."""
    keep_every: timedelta | None = None
    """Also keep for ever one chain of each such span of time, by the time of its base; None: none."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.keep_last < 2:
            raise ValueError(
                f"keep_last={self.keep_last}: keep at least 2, or one damaged file leaves nothing to load"
            )
        if self.keep_every is not None and self.keep_every <= timedelta(0):
            raise ValueError(f"keep_every={self.keep_every} is no span of time; give a positive one, or None")

    def to_delete(self, manifests: Sequence[Manifest]) -> list[int]:
        """Sequences of the saves to delete, in an order in which it is safe to stop anywhere.

        The oldest chain comes first; within a chain the newest row save first and the base last, so that the
        rest of the chain is loadable at any moment.

        Args:
            manifests: all committed saves, in any order. Saves that lead to no base among them are ignored
                and kept: they are a sign of damage, which is for a person to look at.
        """
        chains = _chains(manifests)
        kept = set(chains[-self.keep_last :]) | self._milestones(chains)
        return [
            sequence
            for chain in chains
            if chain not in kept
            for sequence in sorted(chain.sequences, reverse=True)
        ]

    def _milestones(self, chains: Iterable["_Chain"]) -> set["_Chain"]:
        """The first chain of each span of time: later saves and deletions never change the choice."""
        if self.keep_every is None:
            return set()
        milestones: list[_Chain] = []
        for chain in sorted(chains, key=lambda chain: chain.base):
            # In either direction: a clock that was set back must not stop the milestones.
            if not milestones or abs(chain.created - milestones[-1].created) >= self.keep_every:
                milestones.append(chain)
        return set(milestones)


@dataclass(frozen=True)
class _Chain:
    base: int
    created: datetime
    age: tuple[int, int]
    """Rank of the newest state, as `find_states` orders states: smaller is older."""
    sequences: frozenset[int]


def _chains(manifests: Sequence[Manifest]) -> list[_Chain]:
    """Chains that have a base, oldest newest state first."""
    members: dict[int, list[Manifest]] = defaultdict(list)
    whole: set[int] = set()
    for manifest in sorted(manifests, key=lambda manifest: manifest.sequence):
        parent = manifest.parent
        if manifest.kind == "base" or (parent is not None and parent.sequence in whole):
            whole.add(manifest.sequence)
            members[manifest.base].append(manifest)
    chains = [
        _Chain(
            base=base,
            created=datetime.fromisoformat(saves[0].created),
            age=max((max(save.merged, default=save.sequence), save.sequence) for save in saves),
            sequences=frozenset(save.sequence for save in saves),
        )
        for base, saves in members.items()
    ]
    return sorted(chains, key=lambda chain: chain.age)


def delete_save(storage: Storage, folder: str) -> None:
    """Delete one save: its manifest first, so that no reader sees half of a save, then its files.

    Raises:
        CheckpointError: the storage refused; the save may have lost its manifest already.
    """
    storage.delete(f"{folder}/manifest.json")
    storage.delete(folder)


logger = logging.getLogger(__name__)

COPY_BYTES: Final = 8 * 2**20
"""Size of the buffer through which compaction copies state files."""


@dataclass(frozen=True)
class _RankResult:
    """Outcome of one rank's part of a save; see `Committer.commit`."""

    sequence: int
    kind: Kind
    part: RankPart
    problem: str | None
    blocked_s: float
    is_out_of_time: bool


@dataclass(frozen=True, kw_only=True)
class _CommitResult:
    """Outcome of a save, sent by rank 0 to the other ranks."""

    manifest: Manifest | None
    """The committed manifest without the entries of chunks."""
    problems: Sequence[str]
    """Why the save does not count; empty if it does."""
    blocked_s: float
    """Longest time that training waited for the save on any rank."""
    is_out_of_time: bool


@dataclass(kw_only=True)
class Committer:
    """The committed saves of a run, the next sequence, and the operations on them."""

    storage: Storage
    group: RankGroup
    lock: DirectoryLock | None
    """The directory's lock on rank 0; else None."""
    retention: Retention
    merge_after: int
    """Compact a chain into a new base when it has more row saves than this; 0: never."""
    run_id: str
    epoch: int
    next_sequence: int
    committed: list[Manifest]
    """All saves of this run that count, oldest first; only rank 0 has the entries of their chunks."""
    chain: list[Manifest]
    """The base and the row saves that the next row save builds on; chunks as in `committed`."""

    def __post_init__(self) -> None:
        if self.group.rank:
            self.committed = [manifest.without_chunks() for manifest in self.committed]
            self.chain = [manifest.without_chunks() for manifest in self.chain]

    def check_lock(self) -> None:
        """Check that the directory still belongs to this run; before anything is written or deleted.

        Raises:
            LockedError: another run has taken the directory over.
        """
        on_rank_0(self.group, self._check_lock_here)

    def commit(
        self,
        sequence: int,
        kind: Kind,
        part: RankPart,
        problem: str | None,
        manifest_of: Callable[[Sequence[RankPart]], Manifest],
        blocked_s: float = 0.0,
        is_out_of_time: bool = False,
    ) -> tuple[Manifest, float]:
        """Commit a save if every rank has written its `part` and has no `problem`.

        Args:
            sequence: of the save.
            kind: of the save.
            part: entries of the files that this rank has written.
            problem: why this rank failed; None: it did not.
            manifest_of: makes the manifest from the parts of all ranks, in order; called on rank 0.
            blocked_s: how long training on this rank waited for the save.
            is_out_of_time: whether the problem is that the time limit ran out on this rank.

        Returns:
            The manifest, on ranks other than 0 without the entries of chunks, and the longest `blocked_s`.

        Raises:
            SaveGivenUpError: the save does not count, because the time limit ran out on some rank.
            SaveFailedError: the save does not count; names the failure and the rank.
        """
        self.next_sequence = sequence + 1  # after a failure, too: no folder is ever written twice
        own = _RankResult(sequence, kind, part, problem, blocked_s, is_out_of_time)
        results = self.group.gather_to_0(own)
        made: Manifest | None = None

        def write() -> _CommitResult:
            nonlocal made
            assert results is not None
            made, problems = self._write_if_complete(sequence, results, manifest_of)
            return _CommitResult(
                manifest=None if made is None or self.group.world_size == 1 else made.without_chunks(),
                problems=problems,
                blocked_s=max(result.blocked_s for result in results),
                is_out_of_time=any(result.is_out_of_time for result in results),
            )

        outcome = on_rank_0(self.group, write)
        manifest = made or outcome.manifest
        if outcome.problems or manifest is None:
            last = f"save {self.committed[-1].sequence}" if self.committed else "nothing"
            kind_of_error = SaveGivenUpError if outcome.is_out_of_time else SaveFailedError
            raise kind_of_error(
                f"save {sequence} to {self.storage.uri} failed on {'; '.join(outcome.problems)}. "
                f"It does not count; {last} is the newest that does"
            )
        self.committed.append(manifest)
        self.chain = [manifest] if manifest.kind == "base" else [*self.chain, manifest]
        return manifest, outcome.blocked_s

    def clean_up(self) -> None:
        """Compact a long chain, and delete the saves that the retention policy does not keep.

        Raises:
            SaveFailedError: the merged base could not be written, or the newest state does not verify. If the
                chain is damaged, the next save must be a base.
        """
        if self.merge_after and len(self.chain) - 1 > self.merge_after:
            self._merge()
        sequences = self.retention.to_delete(self.committed)
        if not sequences:
            return
        self._verify_newest()  # a damaged newest state must not cost the older ones
        # The other ranks wait here, in the background, and not in the next collective of training.
        deleted = on_rank_0(self.group, lambda: self._delete_all(sequences))
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in deleted]

    def go_back_to(self, state: State, rejected: Collection[int]) -> None:
        """Continue from a state of this run that was just loaded, while no save is under way.

        `rejected` are the sequences of newer saves: they no longer count, and are not deleted.
        """
        self.chain = [manifest.without_chunks() if self.group.rank else manifest for manifest in state.saves]
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in rejected]

    def _merge(self) -> None:
        sequence, chain = self.next_sequence, self.chain
        part = RankPart()
        problem: Exception | None = None
        work = self.group.scatter(self._assign_merging())
        try:
            self._write_merged(sequence, work, part)
        except Exception as error:
            problem = error
        # All ranks must know of damage on any of them, or their chains would differ from here on.
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

    def _assign_merging(self) -> list[list[list[Layer]]] | None:
        """For each rank, files of each shard that it merges, oldest first; None on ranks other than 0."""
        if self.group.rank:
            return None
        layers: dict[Extent, list[Layer]] = {entry.extent: [] for entry in self.chain[0].rows}
        for manifest in self.chain:
            for entry in manifest.rows:
                if entry.extent in layers:
                    layers[entry.extent].append((manifest.folder, entry))
        world_size = self.group.world_size
        shards = [layers[extent] for extent in sorted(layers)]
        return [shards[rank::world_size] for rank in range(world_size)]

    def _write_merged(self, sequence: int, work: list[list[Layer]], part: RankPart) -> None:
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
        """Read the newest state again before anything older is deleted."""
        work = self.group.scatter(self._assign_files())

        def verify() -> None:
            for manifest, entries in zip(self.chain, work, strict=True):
                verify_files(self.storage, manifest, entries)

        _, failed = attempt_on_all(self.group, verify)
        if not failed:
            return
        problems = list(failed.values())
        advice = "the next save looks again"
        if any(isinstance(found, CorruptFileError) for found in problems):
            self._give_up_chain()
            advice = "save a new base, look at the storage"
        raise SaveFailedError(f"{'; '.join(map(str, problems))}. Older saves are kept; {advice}")

    def _assign_files(self) -> list[list[list[FileEntry]]] | None:
        """For each rank, files of each save of the chain that it verifies; None on ranks other than 0."""
        if self.group.rank:
            return None
        files = [manifest.files for manifest in self.chain]
        world_size = self.group.world_size
        return [[entries[rank::world_size] for entries in files] for rank in range(world_size)]

    def _give_up_chain(self) -> None:
        """Drop a damaged chain: no save may build on it, and it must not push older saves out."""
        bad = {manifest.sequence for manifest in self.chain}
        self.committed = [manifest for manifest in self.committed if manifest.sequence not in bad]
        self.chain = []

    def _write_if_complete(
        self,
        sequence: int,
        results: Sequence[_RankResult],
        manifest_of: Callable[[Sequence[RankPart]], Manifest],
    ) -> tuple[Manifest | None, list[str]]:
        """Write the manifest if no rank failed; returns it if durable, and why the save does not count."""
        problems = [f"rank {rank}: {each.problem}" for rank, each in enumerate(results) if each.problem]
        if len({(each.sequence, each.kind) for each in results}) > 1:
            problems.append(
                "all ranks: they are not at the same save; call the checkpointer alike on all ranks"
            )
        manifest = None
        try:
            if not problems:
                made = manifest_of([each.part for each in results])
                made.check()  # readers refuse a manifest that fails this
                self._check_lock_here()
                with self.storage.create(made.path) as sink:
                    sink.write(memoryview(made.to_json()))
                manifest = made
                # A newer owner that listed the saves before this manifest was durable does not count it.
                self._check_lock_here()
        except Exception as error:
            problems = [f"rank 0: {error}"]
        if manifest is None:  # a durable one stays: a newer owner may have found it and build on it
            folder = save_folder(sequence, self.epoch)
            try:
                delete_save(self.storage, folder)
            except Exception as error:  # the other ranks wait for the reason of the failure
                logger.warning("could not delete what a failed save left in %s: %s", folder, error)
        return manifest, problems

    def _delete_all(self, sequences: Sequence[int]) -> set[int]:
        """Delete saves; returns those deleted. If one cannot be, the saves that it builds on stay, too."""
        saves = {manifest.sequence: manifest for manifest in self.committed}
        stuck: set[int] = set()
        deleted: set[int] = set()
        for sequence in sequences:
            save = saves[sequence]
            if save.base in stuck:
                continue
            try:
                self._check_lock_here()
                delete_save(self.storage, save.folder)
                deleted.add(sequence)
            except LockedError:
                raise
            except CheckpointError as error:
                logger.warning("could not delete save %d: %s", sequence, error)
                stuck.add(save.base)  # deleting older saves of this chain would leave a gap in it
        return deleted

    def _check_lock_here(self) -> None:
        if self.lock is not None:
            self.lock.check()
