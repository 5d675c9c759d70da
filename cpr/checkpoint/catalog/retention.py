"""Retention: which saves are deleted, in an order that is safe to interrupt anywhere.

A chain (a base with all row saves on it) is kept or deleted as a whole and is as old as its newest state.
Every policy keeps the two newest chains, and with them the newest state and all that it needs.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.storage.base import Storage
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
