"""Which saves may go: a policy over chains, and an order of deletion that may be cut off anywhere.

A chain, that is a base with all row saves that lie on it, is kept or deleted as a whole and counts as its
newest state. Whatever the policy, the two newest chains stay, and with them the newest state and everything
that it needs.
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
    """How much history to keep."""

    keep_last: int = 2
    """Newest chains that stay; at least 2, so that one which turns out to be damaged leaves another."""
    keep_every: timedelta | None = None
    """Also keep for ever one chain of every such span of time, by when the base was saved; None: none."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.keep_last < 2:
            raise ValueError(
                f"keep_last={self.keep_last}: keep at least 2, or one damaged file leaves nothing to load"
            )
        if self.keep_every is not None and self.keep_every <= timedelta(0):
            raise ValueError(f"keep_every={self.keep_every} is no span of time; give a positive one, or None")

    def doomed(self, manifests: Sequence[Manifest]) -> list[int]:
        """The saves to delete, in an order in which it is safe to stop anywhere.

        Oldest chain first; within a chain the newest row save first and the base last, so that what is left
        of it is whole at any moment.

        Args:
            manifests: all committed saves, in any order. Those that lead to no base among them count for
                nothing and are kept: they are a sign of damage, which is for a person to look at.
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
        """One chain of every span, the first of each: later saves and deletions never change the choice."""
        if self.keep_every is None:
            return set()
        milestones: list[_Chain] = []
        for chain in sorted(chains, key=lambda chain: chain.base):
            # Either way: a clock that was set back must not stop the milestones.
            if not milestones or abs(chain.created - milestones[-1].created) >= self.keep_every:
                milestones.append(chain)
        return set(milestones)


@dataclass(frozen=True)
class _Chain:
    base: int
    created: datetime
    age: tuple[int, int]
    """Of its newest state, as `find_states` orders them: smaller is older."""
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
    """Delete one save so that it stops counting at once: its manifest first, then its files.

    Raises:
        CheckpointError: the storage refused; the save does not count any more if its manifest went.
    """
    storage.delete(f"{folder}/manifest.json")
    storage.delete(folder)
