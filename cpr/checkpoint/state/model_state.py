"""Everything beside the table rows: captured in one moment, and given back.

Dense parameters and what is registered as common are equal on all ranks, so rank 0 writes them alone; what
belongs to one rank (random generators, for example) each rank writes for itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from cpr.checkpoint.format.manifest import TableEntry
from cpr.checkpoint.format.part import tables_of
from cpr.errors import (
    CheckpointError,
    MismatchError,
)
from cpr.shards import dense_tensors
from cpr.shards.shard import TableShard


@dataclass(frozen=True)
class States:
    """What is saved beside the rows, captured in one moment."""

    step: int
    """Training steps done at that moment."""
    tables: dict[str, TableEntry]
    """Those that this rank holds shards of, with the counters of that moment."""
    common: Any | None
    """The same on all ranks; None on ranks that do not write it."""
    own: Any | None
    """Of this rank; None if there is nothing."""


class Stateful(Protocol):
    """Anything whose state belongs into a checkpoint: optimizers, schedules, loaders, trackers."""

    def state_dict(self) -> Any:
        """Its state: nested plain data and tensors, see `cpr.checkpoint.format.tree_file`."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from a state."""


@runtime_checkable
class Heir(Protocol):
    """State of one rank that can also go on from what belonged to several: a sum of which each has a part.

    Ranks that are gone leave nothing to anybody otherwise.
    """

    def state_dict(self) -> Any:
        """Its state, see `Stateful`."""

    def inherit(self, states: Sequence[Any]) -> None:
        """Go on from states of before, instead of the present one; from nothing if there are none.

        Args:
            states: of this rank, if there is one, and of ranks that are gone and whose part falls to it.
        """


class ModelState:
    """The state of a run that is not table rows.

    Args:
        model: the sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dense = dense_tensors(model)
        self._common: dict[str, Stateful] = {}
        self._own: dict[str, Stateful | Heir] = {}
        self._optional: set[str] = set()

    def register(self, name: str, state: Stateful | Heir, per_rank: bool, optional: bool = False) -> None:
        """Save and load `state` under `name`; if it is optional, it stays as it is where it was not saved.

        An `Heir` is a state of single ranks.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._common or name in self._own:
            raise ValueError(f"{name!r} is registered already; choose another name")
        if per_rank:
            self._own[name] = state
        else:
            assert not isinstance(state, Heir), "what ranks have in common has no heirs"
            self._common[name] = state
        if optional:
            self._optional.add(name)

    def capture(self, step: int, rank: int, shards: Sequence[TableShard]) -> States:
        """A copy of all state on the host, as of now, and the tables of the shards with their counters."""
        common = to_host(self.common(step)) if rank == 0 else None
        return States(step, tables_of(shards), common, to_host(self.own()) or None)

    def common(self, step: int) -> dict[str, Any]:
        """What is the same on all ranks, after so many training steps; live, not copied."""
        return {
            "steps_done": step,
            "dense": self._dense,
            "registered": {name: state.state_dict() for name, state in self._common.items()},
        }

    def own(self) -> dict[str, Any]:
        """What belongs to this rank; live, not copied."""
        return {name: state.state_dict() for name, state in self._own.items()}

    @property
    def has_heirs(self) -> bool:
        """Whether something here can go on from what belonged to ranks that are gone."""
        return any(isinstance(state, Heir) for state in self._own.values())

    def check(self, common: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Whether saved state fits this model.

        Args:
            common: of all ranks.
            names: of the registered states that are to be taken from it; None: all.

        Raises:
            MismatchError: names what differs and what to do.
        """
        saved = common["dense"]
        for name in sorted(set(saved) ^ set(self._dense)):
            where = "the model" if name in self._dense else "the saved state"
            raise MismatchError(
                f"only {where} has {name!r}: build the model with the options it was saved with"
            )
        for name, tensor in self._dense.items():
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (tensor, saved[name]))
            if here != there:
                raise MismatchError(
                    f"{name} is {here} in the model and {there} in the saved state: build the model with the "
                    "options it was saved with"
                )
        wanted = set(self._common) - self._optional if names is None else set(names)
        if missing := sorted(wanted - set(common["registered"])):
            raise MismatchError(f"{missing[0]!r} is registered, but was not when this was saved")

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Put everything back if the block raises: what is refused changes nothing.

        Raises:
            CheckpointError: it cannot be put back.
        """
        common, own = to_host(self.common(0)), to_host(self.own())
        try:
            yield
        except BaseException as error:
            try:
                self.apply(common, own)
            except Exception as second:
                raise CheckpointError(
                    f"{error}. What was there before could not be put back either ({second}): the model is a "
                    "mixture; build it again"
                ) from error
            raise

    def apply(
        self,
        common: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        gone: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Put checked state into place; returns the training steps done.

        Args:
            common: of all ranks.
            own: of this rank; None if it was saved by another number of ranks, so that it belongs to nobody.
            gone: of ranks that are no more, as far as it falls to this one; heirs alone take it.

        Raises:
            MismatchError: a registered state refuses its part.
        """
        self.apply_common(common, self._common)
        for name, owned in self._own.items():
            if isinstance(owned, Heir):
                _load(name, owned.inherit, [each[name] for each in (own or {}, *gone) if name in each])
            elif own is not None and name in own:
                _load(name, owned.load_state_dict, own[name])
        return int(common["steps_done"])

    def apply_common(self, common: Mapping[str, Any], names: Collection[str]) -> None:
        """Put dense parameters into place, and those of these registered states that were saved."""
        with torch.no_grad():
            for name, tensor in self._dense.items():
                tensor.copy_(common["dense"][name])
        for name in names:
            if name in common["registered"]:
                _load(name, self._common[name].load_state_dict, common["registered"][name])


def _load(name: str, load: Callable[[Any], Any], saved: Any) -> None:
    try:
        load(saved)
    except CheckpointError:
        raise
    except Exception as error:
        raise MismatchError(
            f"{name!r} refuses what was saved of it ({type(error).__name__}: {error}): build it as it was "
            "when this was saved, or give this model a checkpoint directory of its own"
        ) from error


def to_host(tree: Any) -> Any:
    """A copy of nested state that shares no memory with it, all tensors on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, Mapping):
        return {key: to_host(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(to_host, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(to_host(value) for value in tree)
    return tree
