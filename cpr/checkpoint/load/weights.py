"""Loads a saved model to be used and not trained: tables without optimizer state, and dense parameters.

The directory is only read, also while the run that owns it trains on, saves, and deletes its older saves.
"""

from dataclasses import replace
from typing import Final

from torch import nn

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.resolve import find_newest, load_newest
from cpr.checkpoint.collectives import LONGEST_LOAD, RankGroup
from cpr.checkpoint.load.model_loader import ModelLoader
from cpr.checkpoint.state.model_state import ModelState
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError, NothingSavedError
from cpr.shards import find_shards

ATTEMPTS: Final = 3
"""Loads of a directory whose saves are deleted while they are read, before giving up."""


def load_weights(model: nn.Module, storage: Storage, step: int | None = None) -> State:
    """Load the newest state that verifies, or that of a training step; a collective.

    Args:
        model: holds TorchRec's sharded embeddings; its tables need no optimizer state.
        storage: the checkpoint directory of a run, on any number of ranks.
        step: training step of the state; None: the newest.

    Returns:
        The loaded state.

    Raises:
        ValueError: there is no state of `step`; lists the steps that there are.
        MismatchError: the saves are of another model; names the difference.
        NothingSavedError: nothing was ever saved there.
        CheckpointError: no state can be read.
    """
    group = RankGroup(LONGEST_LOAD)
    try:
        shards = [replace(shard, counters={}) for shard in find_shards(model)]
        loader = ModelLoader(group, shards, (), ModelState(model), weights_only=True)
        for attempt in range(ATTEMPTS):
            before, _ = find_newest(storage, group)
            try:
                found = load_newest(
                    storage, group, lambda state: loader.load(storage, state, names=()), step=step
                )
                break
            except CheckpointError:
                after, _ = find_newest(storage, group)
                moved_on = before and after and before.sequence != after.sequence
                if attempt + 1 == ATTEMPTS or not moved_on:
                    raise
        if found is None:
            raise NothingSavedError(f"nothing was ever saved in {storage.uri}: the run has no model to load")
        return found[0]
    finally:
        group.close()
