"""Loads a saved state into a model, its optimizers and its registered states: on all ranks or on none."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from tqdm import tqdm

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.collectives import RankGroup, on_all
from cpr.checkpoint.load.shard_loader import bytes_to_read, load_shards, read_state_file
from cpr.checkpoint.state.model_state import ModelState
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError
from cpr.shards import create_state
from cpr.shards.optimizers import forget_state, stateful_parameters
from cpr.shards.shard import TableShard


class ModelLoader:
    """Replaces the live state of a model by saved ones. All ranks call its methods together, unless noted."""

    def __init__(
        self,
        group: RankGroup,
        shards: Sequence[TableShard],
        optimizers: Sequence[Optimizer],
        state: ModelState,
    ) -> None:
        self._group, self._shards, self._optimizers, self._state = group, shards, optimizers, state

    def load(self, storage: Storage, state: State, names: Collection[str] | None = None) -> tuple[int, int]:
        """Load a state; returns the bytes read by this rank and the steps done when it was saved.

        Of the registered states only those of `names` are loaded, which are equal on all ranks; None: all.

        Raises:
            MismatchError, CorruptFileError: a rank cannot load the state; unless rows were already being
                overwritten, nothing has changed on any rank.
        """

        def read() -> tuple[Any, Any, list[Any]]:
            common, own, gone = self.read_common(storage, state), None, []
            if names is None and self.has_same_ranks(state):
                own = read_state_file(storage, state, self._group.rank)
            elif names is None and self._state.has_heirs:  # those of all former ranks are dealt out evenly
                ranks = range(self._group.rank, state.newest.world_size, self._group.world_size)
                gone = [read_state_file(storage, state, rank) or {} for rank in ranks]
            self._state.check(common, names)
            return common, own, gone

        common, own, gone = on_all(self._group, read)

        def apply() -> int:
            if names is None:
                return self._state.apply(common, own, gone)
            self._state.apply_common(common, names)
            return int(common["steps_done"])

        return self._replace(storage, state, apply)

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
            return bytes_to_read(state, self._shards)

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
        quiet = None if self._group.rank == 0 else True  # None: quiet unless there is a terminal
        total = bytes_to_read(state, self._shards)
        bar: tqdm[Any] = tqdm(
            total=total, desc="loading", unit="B", unit_scale=True, leave=False, disable=quiet
        )
        with torch.no_grad(), bar:
            return load_shards(storage, state, self._shards, bar.update)


def _columns_in(state: State) -> dict[str, Collection[str]]:
    """Names of the saved columns, by table."""
    return {fqn: table.columns.keys() for fqn, table in state.newest.tables.items()}
