"""Loads a saved state into a model, its optimizers and its registered states: on all ranks or on none."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.verify import verify_files
from cpr.checkpoint.collectives import RankGroup, on_all
from cpr.checkpoint.load.shard_loader import bytes_to_read, load_shards, read_state_file
from cpr.checkpoint.state.changes import UNCHANGED, Changes, Difference, described, table_differences
from cpr.checkpoint.state.model_state import ModelState
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError
from cpr.shards import create_state
from cpr.shards.optimizers import forget_state, stateful_parameters
from cpr.shards.shard import TableShard

logger = logging.getLogger(__name__)


class ModelLoader:
    """Replaces the live state of a model by saved ones. All ranks call its methods together, unless noted.

    With `weights_only`, shards may lack optimizer state that was saved, which is passed over.
    """

    def __init__(
        self,
        group: RankGroup,
        shards: Sequence[TableShard],
        optimizers: Sequence[Optimizer],
        state: ModelState,
        weights_only: bool = False,
    ) -> None:
        self._group, self._shards, self._optimizers, self._state = group, shards, optimizers, state
        self._weights_only = weights_only

    def load(
        self,
        storage: Storage,
        state: State,
        names: Collection[str] | None = None,
        changes: Changes = UNCHANGED,
    ) -> tuple[int, int]:
        """Load a state; returns the bytes read by this rank and the steps done when it was saved.

        Of the registered states only those of `names` are loaded, which are equal on all ranks; None: all.
        What `changes` allow to differ keeps its present values; with `names`, which warm starts give, so do
        all dense tensors that `changes.reset` names.

        Raises:
            MismatchError, CorruptFileError: a rank cannot load the state; unless rows were already being
                overwritten, nothing has changed on any rank.
        """
        here = {shard.table_fqn: shard.table_shape for shard in self._shards}
        tables = {fqn: shape for each in self._group.gather(here) for fqn, shape in each.items()}

        def read() -> tuple[Any, Any, list[Any], list[Difference]]:
            common, own, gone = self.read_common(storage, state), None, []
            differences = [*table_differences(tables, state), *self._state.differences(common)]
            changes.check(differences, state.newest.path)
            if changes != UNCHANGED:
                self._verify(storage, state)
            if names is None and self.has_same_ranks(state):
                own = read_state_file(storage, state, self._group.rank)
            elif names is None and self._state.has_heirs:  # those of all former ranks are dealt out evenly
                ranks = range(self._group.rank, state.newest.world_size, self._group.world_size)
                gone = [read_state_file(storage, state, rank) or {} for rank in ranks]
            self._state.check(common, names, changes)
            return common, own, gone, [*differences, *self._state.asked_for(common, names, changes)]

        common, own, gone, differences = on_all(self._group, read)
        fresh = self._state.fresh_tensors(differences) + self._changed_tables(state)

        def apply() -> int:
            if names is None:
                return self._state.apply(common, own, gone, changes, fresh)
            self._state.apply_common(common, names, changes, fresh)
            return int(common["steps_done"])

        loaded = self._replace(storage, state, apply)
        if self._group.rank == 0:
            where = state.newest.path
            if differences:
                logger.warning("%s is loaded into a changed model: %s", where, described(differences))
            if unneeded := changes.unneeded(differences):  # no error: a restarted worker allows them again
                logger.warning("nothing of %s differs as %s would allow", where, ", ".join(unneeded))
        return loaded

    def load_part(self, storage: Storage, state: State, shards: Sequence[TableShard]) -> int:
        """Load some shards of this rank alone, see `load_shards`; not collective."""
        self.create_optimizer_state(_columns_in(state))
        with torch.no_grad():
            return load_shards(storage, state, shards)

    def create_optimizer_state(self, columns: Mapping[str, Collection[str]]) -> None:
        """See `Checkpointer.create_optimizer_state`; not collective."""
        if any(set(columns.get(shard.table_fqn, ())) - shard.columns.keys() for shard in self._shards):
            for optimizer in self._optimizers:
                create_state(optimizer)

    def has_same_ranks(self, state: State) -> bool:
        """Whether a state was saved by as many ranks as there are now."""
        return state.newest.world_size == self._group.world_size

    @staticmethod
    def read_common(storage: Storage, state: State) -> Any:
        """Read the saved state that is equal on all ranks; not collective."""
        common = read_state_file(storage, state, None)
        if common is None:
            raise CorruptFileError(f"save {state.sequence} of {storage.uri} has no state of the run")
        return common

    def _replace(self, storage: Storage, state: State, apply: Callable[[], int]) -> tuple[int, int]:
        """Load tables, and the rest by `apply`; a refusal on any rank changes nothing on any rank."""
        made = [stateful_parameters(optimizer) for optimizer in self._optimizers]

        def check() -> int:
            self.create_optimizer_state(_columns_in(state))
            return bytes_to_read(state, list(self._saved_parts(state)), self._weights_only)

        try:
            with self._state.unchanged_on_failure():
                on_all(self._group, check)
                applied = on_all(self._group, apply)
                # After the registered states, because these may hold optimizers of tables too, whose state
                # must be of the same moment as the rows.
                return on_all(self._group, lambda: self._load_tables(storage, state)), applied
        except BaseException:
            for optimizer, parameters in zip(self._optimizers, made, strict=True):
                forget_state(optimizer, parameters)
            raise

    def _load_tables(self, storage: Storage, state: State) -> int:
        self.create_optimizer_state(_columns_in(state))
        for shard in self._shards:
            if shard.table_fqn not in state.newest.tables and "iter" in shard.counters:
                shard.counters["iter"].zero_()  # state that was just created counts a step
        shards = list(self._saved_parts(state))
        quiet = None if self._group.rank == 0 else True  # None: quiet unless there is a terminal
        total = bytes_to_read(state, shards, self._weights_only)
        bar: tqdm[Any] = tqdm(
            total=total, desc="loading", unit="B", unit_scale=True, leave=False, disable=quiet
        )
        with torch.no_grad(), bar:
            return load_shards(storage, state, shards, bar.update, self._weights_only)

    def _verify(self, storage: Storage, state: State) -> None:
        """Find damage before any row is overwritten.

        Rows that an older, smaller state lacks would otherwise keep what a damaged one had left there.
        """
        for save in state.saves:
            verify_files(storage, save, save.files[self._group.rank :: self._group.world_size])

    def _saved_parts(self, state: State) -> Iterator[TableShard]:
        """The parts of this rank's shards that the state has, where it may have fewer tables and rows.

        Parts without rows are included, as their counters were saved.
        """
        for shard in self._shards:
            saved, (rows, cols) = state.newest.tables.get(shard.table_fqn), shard.table_shape
            if saved is not None and saved.rows < rows:
                begin, end = shard.extent.rows
                old = shard.narrow(begin, max(begin, min(end, saved.rows)))
                yield replace(old, table_shape=(saved.rows, cols))
            elif saved is not None:
                yield shard

    def _changed_tables(self, state: State) -> list[Tensor]:
        """Weights of tables that are new or have grown."""
        saved = state.newest.tables
        return [
            shard.weights
            for shard in self._shards
            if shard.table_fqn not in saved or saved[shard.table_fqn].rows < shard.table_shape[0]
        ]


def _columns_in(state: State) -> dict[str, Collection[str]]:
    """Names of the saved columns, by table."""
    return {fqn: table.columns.keys() for fqn, table in state.newest.tables.items()}
