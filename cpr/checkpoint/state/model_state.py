"""The state of a run without its table rows: captured in one moment, checked, and restored.

Dense parameters and common registered states are equal on all ranks, so only rank 0 writes them; per-rank
states (random generators, for example) are written by each rank.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from cpr.checkpoint.format.manifest import TableEntry
from cpr.checkpoint.format.part import tables_of
from cpr.checkpoint.state.changes import UNCHANGED, Changes, Difference
from cpr.errors import CheckpointError, MismatchError
from cpr.shards import dense_tensors
from cpr.shards.shard import TableShard


@dataclass(frozen=True)
class CapturedState:
    """The state of a run without its table rows, captured in one moment."""

    step: int
    tables: dict[str, TableEntry]
    """Tables that this rank holds shards of, with the counters of that moment."""
    common: Any | None
    """State that is equal on all ranks; None on ranks other than 0."""
    own: Any | None
    """State of this rank; None if there is none."""


class Stateful(Protocol):
    """An object with state to save: an optimizer, schedule, data loader or tracker."""

    def state_dict(self) -> Any:
        """The state: nested plain data and tensors, see `cpr.checkpoint.format.tree_file`."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


@runtime_checkable
class Heir(Protocol):
    """Per-rank state that survives a change of the world size, such as each rank's part of a sum.

    Other per-rank states are dropped when a checkpoint is loaded at another world size.
    """

    def state_dict(self) -> Any:
        """The state, see `Stateful`."""

    def inherit(self, states: Sequence[Any]) -> None:
        """Replace the present state by the combination of saved states; by an empty one if there are none.

        Args:
            states: saved by this rank, if any, and by the former ranks that are assigned to this rank.
        """


@runtime_checkable
class OfTensors(Protocol):
    """State that belongs to tensors of the model, such as an optimizer's; some of them may start anew."""

    def load_except(self, state: Any, fresh: Sequence[Tensor]) -> Any:
        """Restore a state, but for the parts of `fresh` tensors, which stay as they are."""


class ModelState:
    """Dense parameters of a sharded model and all registered states."""

    def __init__(self, model: nn.Module) -> None:
        self._dense = dense_tensors(model)
        self._common: dict[str, Stateful] = {}
        self._own: dict[str, Stateful | Heir] = {}
        self._optional: set[str] = set()

    def register(self, name: str, state: Stateful | Heir, per_rank: bool, optional: bool = False) -> None:
        """Save and load `state` under `name`; see `Checkpointer.register`."""
        if name in self._common or name in self._own:
            raise ValueError(f"{name!r} is registered already; choose another name")
        if per_rank:
            self._own[name] = state
        else:
            assert not isinstance(state, Heir), "only per-rank states can be an Heir"
            self._common[name] = state
        if optional:
            self._optional.add(name)

    def capture(self, step: int, rank: int, shards: Sequence[TableShard]) -> CapturedState:
        """Copy all state to the host, with the tables of the shards and their counters."""
        common = to_host(self.common(step)) if rank == 0 else None
        return CapturedState(step, tables_of(shards), common, to_host(self.own()) or None)

    def common(self, step: int) -> dict[str, Any]:
        """State that is equal on all ranks, at this training step; live, not copied."""
        return {
            "steps_done": step,
            "dense": self._dense,
            "registered": {name: state.state_dict() for name, state in self._common.items()},
        }

    def own(self) -> dict[str, Any]:
        """State of this rank; live, not copied."""
        return {name: state.state_dict() for name, state in self._own.items()}

    @property
    def has_heirs(self) -> bool:
        """Whether some per-rank state survives a change of the world size."""
        return any(isinstance(state, Heir) for state in self._own.values())

    def differences(self, common: Mapping[str, Any]) -> list[Difference]:
        """Dense tensors whose shape differs from what was saved, or that are on one side only.

        Raises:
            MismatchError: a tensor has another data type.
        """
        saved, found = common["dense"], []
        for name in sorted(set(saved) ^ set(self._dense)):
            where = "the model" if name in self._dense else "the saved state"
            found.append(Difference(kind="reset", name=name, text=f"only {where} has {name!r}"))
        for name, mine in self._dense.items():
            if name not in saved:
                continue
            theirs = saved[name]
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (mine, theirs))
            text = f"{name} is {here} in the model and {there} in the saved state"
            if mine.dtype != theirs.dtype:
                raise MismatchError(f"{text}: build the model with the options it was saved with")
            if mine.shape != theirs.shape:
                detail = f" ({list(theirs.shape)} to {list(mine.shape)})"
                found.append(Difference(kind="reset", name=name, text=text, detail=detail))
        return found

    def asked_for(
        self, common: Mapping[str, Any], names: Collection[str] | None, changes: Changes
    ) -> list[Difference]:
        """What fits the saved state and starts anew all the same, as `changes` name it.

        So do registered states and, in a warm start, dense tensors. `names` are those of `ModelLoader.load`.
        """
        found = [
            name
            for name in (*self._common, *self._own)
            if name in changes.reset and (names is None or name in names)
        ]
        if names is not None:  # else: a restarted worker says the same words, and keeps what it has learned
            saved = common["dense"]
            found += [
                name
                for name, mine in self._dense.items()
                if changes.resets(name) and name in saved and saved[name].shape == mine.shape
            ]
        return [Difference(kind="reset", name=name) for name in found]

    def fresh_tensors(self, found: Collection[Difference]) -> list[Tensor]:
        """Dense tensors that start anew by these differences."""
        names = {each.name for each in found if each.kind == "reset"}
        return [tensor for name, tensor in self._dense.items() if name in names]

    def check(
        self,
        common: Mapping[str, Any],
        names: Collection[str] | None = None,
        changes: Changes = UNCHANGED,
    ) -> None:
        """Refuse saved state that does not fit this model, but for what `changes` allow.

        Raises:
            MismatchError: names the difference and what to do.
        """
        changes.check(self.differences(common), "the saved state")
        wanted = set(self._common) - self._optional if names is None else set(names)
        if missing := sorted(wanted - set(common["registered"]) - set(changes.reset)):
            raise MismatchError(
                f"{missing[0]!r} is registered, but was not when this was saved. What to do: resume with the "
                "program and launcher options with which it was saved, or warm-start a new run"
            )

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Restore the present state if the block raises, so that a refused load changes nothing.

        Raises:
            CheckpointError: the present state cannot be restored.
        """
        # A copy on the host, because state dicts may alias the tensors that a load overwrites.
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
        changes: Changes = UNCHANGED,
        fresh: Sequence[Tensor] = (),
    ) -> int:
        """Load checked state; returns the training steps done.

        `own` is the state of this rank, None if it was saved at another world size; `gone` are those of
        former ranks that are assigned to this rank: only an `Heir` takes them. `fresh` are tensors of the
        model that are not loaded, and neither is their optimizer state.

        Raises:
            MismatchError: a registered state refuses its part.
        """
        self.apply_common(common, self._common, changes, fresh)
        for name, owned in self._own.items():
            if name in changes.reset:
                continue
            if isinstance(owned, Heir):
                _load(name, owned.inherit, [each[name] for each in (own or {}, *gone) if name in each])
            elif own is not None and name in own:
                _load(name, owned.load_state_dict, own[name])
        return int(common["steps_done"])

    def apply_common(
        self,
        common: Mapping[str, Any],
        names: Collection[str],
        changes: Changes = UNCHANGED,
        fresh: Sequence[Tensor] = (),
    ) -> None:
        """Load dense parameters, and those of the named registered states that were saved; see `apply`."""
        with torch.no_grad():
            for name, tensor in self._dense.items():
                if not any(tensor is each for each in fresh):
                    tensor.copy_(common["dense"][name])
        for name in names:
            if name in common["registered"] and name not in changes.reset:
                state = self._common[name]
                load = state.load_state_dict
                if isinstance(state, OfTensors):
                    load = partial(state.load_except, fresh=fresh)
                _load(name, load, common["registered"][name])


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
    """Deep-copy nested state, with all tensors on the CPU."""
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


class RandomGenerators:
    """State of the default generators of Python, NumPy, PyTorch and the current CUDA device."""

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators."""
        version, numbers, gauss = random.getstate()
        state = {
            # an array and not 625 integers: this state is captured at each step
            "python": (version, np.array(numbers, dtype=np.uint32), gauss),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators; one that was not saved or does not exist here is unchanged."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(map(int, numbers)), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
