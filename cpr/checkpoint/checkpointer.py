"""`Checkpointer`: what a training loop holds to save a sharded model while it trains, and to load it."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer
from tqdm import tqdm

from cpr.checkpoint.catalog.chain import Rejected, State
from cpr.checkpoint.catalog.committer import Committer
from cpr.checkpoint.catalog.ownership import Ownership
from cpr.checkpoint.catalog.resolve import find_newest, load_newest, on_rank_0, survey
from cpr.checkpoint.collectives import LONGEST_LOAD, LONGEST_SAVE, LONGEST_STEP, Alone, RankGroup, on_all
from cpr.checkpoint.config import WRITER_BYTES, CheckpointConfig
from cpr.checkpoint.format.manifest import Kind, Moment
from cpr.checkpoint.format.part import table_entry
from cpr.checkpoint.load.loader import bytes_to_read, load_shards, read_state_file
from cpr.checkpoint.load.reading import LoadStats
from cpr.checkpoint.ownership.records import NOBODYS, Claimant
from cpr.checkpoint.save.request import SaveRequest, agree
from cpr.checkpoint.save.snapshot import Selection, Snapshot, select_rows, shards_named
from cpr.checkpoint.save.stager import Stager, seconds_left
from cpr.checkpoint.save.staging import StagingPool, rows_per_piece
from cpr.checkpoint.save.writer_thread import Save, WriterThread
from cpr.checkpoint.state.model_state import Heir, ModelState, Stateful, States
from cpr.checkpoint.state.optimizer_state import OptimizerState
from cpr.checkpoint.state.random_state import RandomGenerators
from cpr.checkpoint.storage.base import Storage, open_storage
from cpr.errors import (
    CheckpointError,
    CorruptFileError,
    LockedError,
    MismatchError,
    NothingSavedError,
    SaveFailedError,
    is_failure,
)
from cpr.shards import before_updates, create_state, find_shards
from cpr.shards.optimizers import forget_state, ordinary, stateful_parameters, without_fused
from cpr.shards.shard import TableShard

__all__ = ["CheckpointConfig", "Checkpointer", "Loaded"]

T = TypeVar("T")

LEAVE_S: Final = 5.0
"""How long closing waits for the background thread to end by itself."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `Checkpointer.load` has loaded."""

    state: State
    rejected: Sequence[Rejected]
    """Newer saves that could not be loaded, and why."""
    same_ranks: bool
    """Whether it was saved by as many ranks: then state of single ranks (random generators) came back."""
    bytes_read: int
    """By this rank."""
    seconds: float


class Checkpointer:
    """Saves a sharded model in the background while it trains, and loads it on any number of ranks.

    All ranks make the same calls in the same order, in the thread that trains. Training waits for rows to be
    copied, and for nothing else: encoding, writing and committing happen in a thread. Rows of fused tables on
    the CPU are copied beside the next forward pass, too, before the backward pass changes them; whoever
    writes to them in another way calls `settle` before.

    Args:
        model: holds TorchRec's sharded embeddings, such as `DistributedModelParallel`.
        config: how to save.
        optimizers: ordinary optimizers that update tables, as data-parallel ones have: their rows are
            saved with their optimizer state. Fused optimizers are found by themselves.
        claimant: whose workers these are; the directory is handed on among those of one session.
        storage: of the directory; None: what `config.uri` names.
        timeout: how long training waits for the slowest rank to come to a save as well; for reading it is
            at least an hour, and what waits in the background is patient.
        before_save: called before each save; if it raises on any rank, nothing is saved, and a
            `FloatingPointError`, `ValueError` or `CheckpointError` is raised on all of them as it is. A save
            of values that are no numbers would push out older ones that are sound.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CheckpointConfig,
        optimizers: Sequence[Optimizer] = (),
        *,
        claimant: Claimant = NOBODYS,
        storage: Storage | None = None,
        timeout: timedelta = LONGEST_STEP,
        before_save: Callable[[], object] | None = None,
    ) -> None:
        self._config = config
        self._storage = storage or open_storage(config.uri)
        self._optimizers = ordinary(optimizers)
        self.shards = find_shards(model, self._optimizers)
        """All table shards on this rank."""
        for shard in self.shards:
            rows_per_piece(shard.columns)  # raises if not even one row fits
        self._before_save = before_save
        self._state = ModelState(model)
        self._state.register("random_generators", RandomGenerators(), per_rank=True)
        self.agreement = RankGroup(timeout)
        """How ranks agree in the thread that trains, between calls of the checkpointer."""
        self._group = RankGroup(max(timeout, LONGEST_LOAD))
        self.ownership = Ownership(self._storage, self._group, claimant)
        """Of the directory: taken by `claim`."""
        self._background = RankGroup(LONGEST_SAVE)
        self._pool = StagingPool(
            config.host_memory_bytes - WRITER_BYTES, any(shard.weights.is_cuda for shard in self.shards)
        )
        self.steps_done = 0
        """Calls of `step`, those before the loaded state included."""
        self._is_closed = False
        self._loaded: State | None = None
        self._rejected: frozenset[int] = frozenset()
        self._history: Committer | None = None
        self._saver: WriterThread | None = None
        self._warm_up: Thread | None = None
        self._save: Save | None = None
        self._stager = Stager(self._pool)
        self._hooks = before_updates(model, (), self._stager.settle)

    @property
    def uri(self) -> str:
        """Of the directory, for messages."""
        return self._storage.uri

    @property
    def state(self) -> ModelState:
        """All that is saved beside table rows."""
        return self._state

    @property
    def staged_bytes(self) -> int:
        """Host memory that staging buffers take now."""
        return self._pool.allocated_bytes

    @property
    def newest_step(self) -> int | None:
        """Training steps done in the newest state of this run that counts; None before the first."""
        if self._history is None:
            return None if self._loaded is None else self._loaded.step
        return self._history.chain[-1].step if self._history.chain else None

    @property
    def has_base(self) -> bool:
        """Whether row saves of this rank's shards have a base of this sharding plan and these optimizers.

        To be asked while no save is under way. False before `prepare`.
        """
        if self._history is None:
            return False
        try:
            self._check_base(self.shards)
        except (ValueError, MismatchError):
            return False
        return True

    def register(
        self, name: str, state: Stateful | Heir, *, per_rank: bool = False, optional: bool = False
    ) -> None:
        """Save and load `state` with the model; before the first save or load.

        Args:
            name: of it in the checkpoint.
            state: has `state_dict` and `load_state_dict`. Of a TorchRec `CombinedOptimizer`, fused parts are
                left out: their state is saved with the rows of their tables.
            per_rank: it differs by rank (each rank saves its own, and gets it back at the same world size; at
                another one, what can `inherit` goes on from those of several); otherwise it is the same on
                all and rank 0 saves it.
            optional: it stays as it is when what is loaded was saved without it.

        Raises:
            ValueError: the name is taken, or an optimizer is one around a fused optimizer.
        """
        if isinstance(state, Optimizer):
            state = OptimizerState(without_fused(state) or CombinedOptimizer([]))
        self._state.register(name, state, per_rank, optional)

    def make_room(self, columns: Mapping[str, Collection[str]]) -> None:
        """Have optimizers that make their state in the first step make it now, where some is to be loaded.

        Args:
            columns: that are to be loaded, by table.
        """
        if any(set(columns.get(shard.table_fqn, ())) - shard.columns.keys() for shard in self.shards):
            for optimizer in self._optimizers:
                create_state(optimizer)

    def claim(self) -> None:
        """Take the directory for this run, which keeps others out; the first save does it otherwise.

        Called before `load`, it makes sure that nobody saves between the two.

        Raises:
            LockedError: another run that is alive writes there.
            CheckpointError: it cannot be written to.
        """
        self._check_open()
        self.ownership.claim()

    def finish(self) -> None:
        """Record in the directory that the run has reached its end, once its last save is committed.

        Workers that meet afterwards learn of it, and end. Called by all ranks; durable when it returns.

        Raises:
            LockedError: another run has taken the directory over.
            CheckpointError: it cannot be written to.
        """
        self.ownership.finish(self.steps_done)

    def prepare(self) -> None:
        """Get ready to save: claim the directory, see what is in it, take memory; the first save does it too.

        Raises:
            LockedError: another run that is alive writes to the directory.
            MismatchError: the directory holds saves that this run has not loaded.
            CheckpointError: it cannot be written to.
        """
        if self._history is not None:
            return
        self.claim()
        run_id = self.ownership.run_id if self._loaded is None else self._loaded.newest.run_id
        found = survey(self._storage, self._group, run_id, self._loaded, self._rejected)
        self._history = Committer(
            storage=self._storage,
            group=self._background,
            lock=self.ownership.lock,
            retention=self._config.retention,
            merge_after=self._config.merge_after,
            run_id=run_id,
            epoch=self.ownership.epoch,
            next_sequence=found.next_sequence,
            committed=list(found.committed),
            chain=list(self._loaded.saves) if self._loaded else [],
        )
        self._saver = WriterThread(self._storage, self._pool, self._background, self._history)
        num_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in self._written_here())
        self._warm_up = Thread(
            target=self._pool.warm_up, args=(num_bytes,), name="checkpoint-warm-up", daemon=True
        )
        self._warm_up.start()

    def load(self) -> Loaded | None:
        """Load the newest state that verifies on every rank; None if nothing was ever saved.

        Saves that do not verify are left out with a warning that says why. What is refused changes nothing;
        if rows turn out to be damaged while they are read, and no older state loads, tables are a mixture.

        Raises:
            MismatchError: what is saved is not of this model; says what differs.
            NoUsableStateError: there are saves, but none loads; lists why.
            CheckpointError: the storage cannot be read.
        """
        self._check_open()
        began = time.perf_counter()
        self.wait_until_idle()
        found = load_newest(self._storage, self._group, self._attempt)
        if found is None:
            return None
        state, (bytes_read, self.steps_done), rejected = found
        self._loaded, self._rejected = state, frozenset(entry.sequence for entry in rejected)
        if self._history is not None:
            self._history.go_back_to(state, self._rejected)
        return Loaded(
            state=state,
            rejected=tuple(rejected),
            same_ranks=self._is_from_as_many(state),
            bytes_read=bytes_read,
            seconds=time.perf_counter() - began,
        )

    def warm_start(self, uri: str, states: Collection[str]) -> State:
        """Begin with the model of another run: its tables, with optimizer state, and its dense parameters.

        Of the registered states only those named are loaded. `steps_done` and the saves of this run begin at
        0. The other directory, which may be of another number of ranks, is only read. Collective; before the
        first step.

        Args:
            uri: of the other run's checkpoint directory.
            states: names of registered states, the same on all ranks, see `register`.

        Returns:
            The state that was loaded, the newest that verifies.

        Raises:
            NothingSavedError: nothing was ever saved there.
            CheckpointError: as `load`.
        """
        self._check_open()
        storage = open_storage(uri)

        def read(state: State) -> Any:
            common = self._read_common(storage, state)
            self._state.check(common, states)
            return common

        def attempt(state: State) -> LoadStats:
            common = on_all(self._group, lambda: read(state))
            return self._replace(storage, state, lambda: self._state.apply_common(common, states))[0]

        found = load_newest(storage, self._group, attempt)
        if found is None:
            raise NothingSavedError(
                f"nothing was ever saved in {storage.uri}: a warm start needs a run that has saved"
            )
        return found[0]

    def newest_state(self) -> State | None:
        """The newest state in the directory, as its manifests tell; None if there is none. Collective.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        self._check_open()
        return find_newest(self._storage, self._group)[0]

    def registered_in(self, state: State, name: str) -> Any:
        """What was saved of a registered state that is the same on all ranks; nothing is loaded. Collective.

        Args:
            state: one of this directory, see `newest_state`.
            name: as in `register`.

        Raises:
            CheckpointError: it was not saved, or cannot be read.
        """

        def read() -> Any:
            common = read_state_file(self._storage, state, None)
            if common is None or name not in common["registered"]:
                raise CorruptFileError(f"save {state.sequence} of {self._storage.uri} holds no {name!r}")
            return common["registered"][name]

        self._check_open()
        return on_rank_0(self._group, read)

    def go_on(self, steps_done: int) -> tuple[State | None, Sequence[Rejected]]:
        """Go on with a model that is ahead of what is saved: nothing is loaded, the next save follows.

        Called by all ranks, instead of `load`, before anything is saved.

        Args:
            steps_done: calls of `step` that the live model has behind it.

        Returns:
            The newest state, which row saves build on, and newer saves that are damaged: what tracks changed
            rows since one of those knows too little for a row save.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        self._check_open()
        assert self._history is None, "going on comes before the first save"
        state, rejected = find_newest(self._storage, self._group)
        self._loaded, self._rejected = state, frozenset(entry.sequence for entry in rejected)
        self.steps_done = steps_done
        return state, rejected

    def load_shards(
        self,
        names: Sequence[str],
        ranges: Mapping[str, Sequence[tuple[int, int]]] | None = None,
        *,
        ahead_of: tuple[int, bool] | None = None,
    ) -> tuple[State, LoadStats, Sequence[Rejected]]:
        """Load some shards of this rank alone, from the newest state in which they verify; reads no others.

        Not collective: what one worker has lost, it brings back by itself. Dense parameters and registered
        state stay as they are.

        Args:
            names: of the shards, see `TableShard.name`.
            ranges: for shards that are not wanted as a whole: row ids of the table, from the first to before
                the last. All else in them stays as it is, and no other chunks are read.
            ahead_of: training steps done by the model that these shards are laid into, and whether the next
                step has begun to change it: no newer rows are loaded; None: any are.

        Returns:
            The state that they are from, what reading took, and newer saves that were passed over, with the
            reason.

        Raises:
            ValueError: this rank has no such shard, or not these rows of it.
            NothingSavedError: nothing was ever saved.
            CheckpointError: as `load`.
        """
        shards = [
            part
            for shard in shards_named(self.shards, names)
            for part in _parts(shard, None if ranges is None else ranges.get(shard.name))
        ]
        self.settle()

        def attempt(state: State) -> LoadStats:
            if ahead_of is not None:
                _check_older(state, *ahead_of)
            self.make_room(_columns_in(state))
            with torch.no_grad():
                return load_shards(self._storage, state, shards)

        found = load_newest(self._storage, Alone(), attempt)
        if found is None:
            raise NothingSavedError(
                f"nothing was ever saved in {self._storage.uri}: save once before shards can come from there"
            )
        return found

    def save(self, moment: Moment = "rolling", *, timeout_s: float | None = None) -> Save | None:
        """Begin a full save: all shards and all registered state, the latter as of now.

        Args:
            moment: `consistent` copies everything before it changes, so that the save is this moment (what
                exact resume needs); `rolling` copies a little in each of the next `step` calls, so that a row
                and its optimizer state are from one moment, but different rows from different steps (what
                partial recovery needs).
            timeout_s: give a consistent save up if copying takes longer on some rank, which is no failure,
                and do not begin it if waiting for the save before it does.

        Returns:
            The save; None if it was skipped because another is under way.

        Raises:
            SaveFailedError: an earlier save failed in the background.
            LockedError: another run that is alive writes to the directory.
            MismatchError: the directory holds saves that this run has not loaded.
        """
        return self._begin("base", moment, None, timeout_s)

    def save_rows(self, rows: Mapping[str, Tensor], *, began: float | None = None) -> Save | None:
        """Begin a row save: these rows, with their optimizer state, and all registered state, as of now.

        Args:
            rows: row ids of the table by `TableShard.name`, any integer dtype and order; nothing is fine. Of
                replicated tables, the rows that any rank names are saved.
            began: by `time.perf_counter`, when training began to wait for them to be chosen; None: only now.

        Returns:
            The save; None if it was skipped because another is under way.

        Raises:
            SaveFailedError: an earlier save failed in the background.
            ValueError: unknown shards or rows, or there is no base to build on.
            MismatchError: the base is of another sharding plan or optimizer; save a new one.
        """
        return self._begin("rows", "consistent", rows, began=began)

    def step(self) -> None:
        """A training step is complete: rows, dense parameters and registered state belong together.

        Raises:
            SaveFailedError: a save failed in the background; names the file.
        """
        self.settle()
        self.steps_done += 1
        self._raise_failure()
        self._stager.copy_some(self.steps_done)

    def settle(self) -> None:
        """Wait until tables may be written to: before that, rows of this moment may still have to be copied.

        Optimizers need not be told. Not collective.
        """
        self._stager.settle()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save that is under way is committed; called by all ranks, which hear the same.

        Args:
            timeout_s: wait no longer. What is not copied by then on some rank is given up; what is only still
                to be written may be committed later. That it failed is not told then: it was asked for.

        Returns:
            Whether it is committed, or none was under way.

        Raises:
            SaveFailedError: it failed; names the file.
        """
        self._wait_here(None if timeout_s is None else time.monotonic() + timeout_s)
        save = self._save
        outcomes = self.agreement.gather(None if save is None else save.outcome)
        if save is not None and True in outcomes:
            save.wait()  # some rank knows of the commit, and this one is about to
        elif save is not None:
            save.is_excused = True
        for outcome in outcomes:
            if isinstance(outcome, SaveFailedError):
                raise outcome
        return False not in outcomes or True in outcomes

    def _wait_here(self, deadline: float | None) -> None:
        """Copy what is left, and wait until this rank knows what became of the save, or for so long."""
        self._stager.finish(self.steps_done, deadline)
        if self._save is not None:
            self._save.wait(seconds_left(deadline))

    def wait_until_idle(self, deadline: float | None = None) -> bool:
        """Wait until the save under way is committed, and merging and deleting after it are done.

        Args:
            deadline: by `time.monotonic`; wait no longer, and give up what is not copied by then.

        Returns:
            Whether they are.

        Raises:
            SaveFailedError: one of them failed; names the file.
        """
        self._wait_here(deadline)
        self._raise_failure()
        idle = self._save is None or self._save.wait_until_over(seconds_left(deadline))
        self._raise_failure()
        return idle

    def is_free(self) -> bool:
        """Whether on no rank a save is under way, or what is due after it; called by all of them.

        Raises:
            SaveFailedError: the last save failed in the background.
        """
        is_free = all(self.agreement.gather(self._save is None or self._save.is_over))
        if is_free:
            self._raise_failure()
        return is_free

    def close(self, *, abandon: bool = False) -> None:
        """Finish the save that is under way and let go of the directory; nothing can be saved after.

        Args:
            abandon: leave it unfinished instead; older saves are untouched.

        Raises:
            SaveFailedError: the save failed; the directory is let go of all the same.
        """
        if self._is_closed:
            return
        try:
            if not abandon:
                self.wait_until_idle()
        finally:
            self._is_closed = True
            self._release()

    def __enter__(self) -> Self:
        """The checkpointer, closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, which `sys.exit(0)` is not, abandon what is under way."""
        self.close(abandon=is_failure(error))

    def _begin(
        self,
        kind: Kind,
        moment: Moment,
        rows: Mapping[str, Tensor] | None,
        timeout_s: float | None = None,
        began: float | None = None,
    ) -> Save | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        began = time.perf_counter() if began is None else began
        self._prepare_to_save()
        selections, states, wish = self._make_wish(kind, moment, rows, deadline)
        wishes = self.agreement.gather(wish)
        if not agree(wish, wishes):
            return None
        if rows is not None:
            selections += self._replicated_selections(wishes)
        assert self._saver is not None
        assert states is not None
        save = Save(kind, moment, self._config.codec if kind == "rows" else "exact")
        self._save = save
        self._stager.begin(save, Snapshot(selections), states)
        save.blocked_s = time.perf_counter() - began  # already now: a small save may soon be committed
        self._saver.start(save)
        if moment == "consistent":
            self._stager.copy_beside(self.steps_done, deadline)
        save.blocked_s = time.perf_counter() - began
        return save

    def _prepare_to_save(self) -> None:
        """`prepare`; storage that fails, fails this save alone."""
        try:
            self.prepare()
        except (LockedError, MismatchError):
            raise
        except CheckpointError as error:
            raise SaveFailedError(f"no save can begin in {self._storage.uri}: {error}") from error

    def _make_wish(
        self, kind: Kind, moment: Moment, rows: Mapping[str, Tensor] | None, deadline: float | None
    ) -> tuple[list[Selection], States | None, SaveRequest]:
        """What this rank copies of its own shards, its state, what it tells the others; raises nothing."""
        selections: list[Selection] = []
        states: States | None = None
        replicated: dict[str, Tensor] = {}
        problem: Exception | None = None
        is_ready = self._save is None or self._save.is_over
        try:
            if self._config.when_busy == "wait":
                is_ready = self.wait_until_idle(deadline)
            self._raise_failure()
            if self._before_save is not None:
                self._before_save()
            if rows is None:
                selections = [Selection(shard, None) for shard in self._written_here()]
            else:
                asked = select_rows(self.shards, rows)
                selections = [each for each in asked if not each.shard.replicated]
                replicated = {
                    each.shard.name: each.ids
                    for each in asked
                    if each.shard.replicated and each.ids is not None
                }
                self._check_base([each.shard for each in asked])
            states = self._state.capture(self.steps_done, self._group.rank, self.shards)
        except (CheckpointError, ValueError, FloatingPointError) as error:
            problem = error
        except Exception as error:  # of somebody's state_dict; its class may not be known to other ranks
            problem = SaveFailedError(f"the state cannot be saved: {type(error).__name__}: {error}")
        return selections, states, SaveRequest(kind, moment, self.steps_done, is_ready, replicated, problem)

    def _replicated_selections(self, wishes: Sequence[SaveRequest]) -> list[Selection]:
        selections = []
        for shard in self._written_here():
            asked = [wish.replicated[shard.name] for wish in wishes if shard.name in wish.replicated]
            if shard.replicated and asked:
                selections += select_rows([shard], {shard.name: torch.cat(asked)})
        return selections

    def _attempt(self, state: State) -> tuple[int, int]:
        """Load a state, on all ranks or on none; bytes read by this one and training steps done."""

        def read() -> tuple[Any, Any, list[Any]]:
            common, own, gone = self._read_common(self._storage, state), None, []
            if self._is_from_as_many(state):
                own = read_state_file(self._storage, state, self._group.rank)
            elif self._state.has_heirs:  # everybody's part falls to somebody, evenly
                ranks = range(self._group.rank, state.newest.world_size, self._group.world_size)
                gone = [read_state_file(self._storage, state, rank) or {} for rank in ranks]
            self._state.check(common)
            return common, own, gone

        common, own, gone = on_all(self._group, read)
        stats, steps_done = self._replace(self._storage, state, lambda: self._state.apply(common, own, gone))
        return stats.bytes_read, steps_done

    def _replace(self, storage: Storage, state: State, apply: Callable[[], T]) -> tuple[LoadStats, T]:
        """Put a state in the place of this model's; one that is refused on any rank changes nothing on any.

        Args:
            storage: where the state is.
            state: it.
            apply: puts everything but the tables into place.

        Returns:
            What reading the tables took, and what `apply` gave.
        """
        made = [stateful_parameters(optimizer) for optimizer in self._optimizers]

        def check() -> int:
            self.make_room(_columns_in(state))
            return bytes_to_read(state, self.shards)

        try:
            with self._state.unchanged_on_failure():
                on_all(self._group, check)
                applied = on_all(self._group, apply)
                # after the registered state: that may hold optimizers of tables too, whose rows must be of
                # one moment
                return on_all(self._group, lambda: self._load_tables(storage, state)), applied
        except BaseException:
            for optimizer, parameters in zip(self._optimizers, made, strict=True):
                forget_state(optimizer, parameters)
            raise

    def _read_common(self, storage: Storage, state: State) -> Any:
        """What a state holds that is the same on all ranks, besides tables."""
        common = read_state_file(storage, state, None)
        if common is None:
            raise CorruptFileError(f"save {state.sequence} of {storage.uri} has no state of the run")
        return common

    def _load_tables(self, storage: Storage, state: State) -> LoadStats:
        """Load the shards of this rank."""
        self.make_room(_columns_in(state))
        with torch.no_grad(), self._progress(bytes_to_read(state, self.shards)) as bar:
            return load_shards(storage, state, self.shards, progress=bar.update)

    def _progress(self, num_bytes: int) -> "tqdm[Any]":
        quiet = None if self._group.rank == 0 else True  # None: where there is no terminal
        return tqdm(total=num_bytes, desc="loading", unit="B", unit_scale=True, leave=False, disable=quiet)

    def _is_from_as_many(self, state: State) -> bool:
        return state.newest.world_size == self._group.world_size

    def _written_here(self) -> list[TableShard]:
        return [shard for shard in self.shards if self._group.rank == 0 or not shard.replicated]

    def _check_base(self, shards: Sequence[TableShard]) -> None:
        assert self._history is not None
        if not self._history.chain:
            raise ValueError("a row save needs a base to build on: call save() first")
        base = self._history.chain[0]
        places = {entry.extent for entry in base.rows}
        for shard in shards:
            same_columns = base.tables[shard.table_fqn].columns == table_entry(shard).columns
            if shard.extent not in places or not same_columns:
                raise MismatchError(
                    f"{shard.name} is no shard of base {base.sequence}, which was saved under another "
                    "sharding plan or optimizer: call save() first, so that row saves have a base of this one"
                )

    def _raise_failure(self) -> None:
        save = self._save
        if save is not None and save.error is not None:
            self._save = None
            if not save.is_excused:
                raise save.error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this checkpointer is closed; make another one")

    def _release(self) -> None:
        self._stager.give_up()
        self._hooks.remove()
        if self._warm_up is not None:
            self._warm_up.join(LEAVE_S)
        if self._saver is not None and not self._saver.close(LEAVE_S):
            return  # the thread is still in a collective or a write; it and the lock end with the process
        self.ownership.release()
        for group in (self._background, self._group, self.agreement):
            group.close()


def _check_older(state: State, steps_done: int, interrupted: bool) -> None:
    """Raise `CorruptFileError`, so that older states are tried, where rows would be newer than the model."""
    if state.step > steps_done or state.newest_row_step > steps_done + interrupted:
        newest = max(state.step, state.newest_row_step)
        raise CorruptFileError(f"it has rows of step {newest}, and the model is at step {steps_done}")


def _parts(shard: TableShard, ranges: Sequence[tuple[int, int]] | None) -> list[TableShard]:
    return [shard] if ranges is None else [shard.narrow(begin, end) for begin, end in ranges]


def _columns_in(state: State) -> dict[str, Collection[str]]:
    """Names of the columns that were saved, by table."""
    return {fqn: table.columns.keys() for fqn, table in state.newest.tables.items()}
