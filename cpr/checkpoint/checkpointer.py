"""`Checkpointer`: saves a sharded model while it trains, and loads it."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer

from cpr.checkpoint.catalog.chain import ManifestCache, Rejected, State, own_states
from cpr.checkpoint.catalog.committer import Committer
from cpr.checkpoint.catalog.ownership import Ownership
from cpr.checkpoint.catalog.resolve import find_newest, load_newest, on_rank_0, sweep_and_list
from cpr.checkpoint.collectives import LONGEST_LOAD, LONGEST_SAVE, LONGEST_STEP, Alone, RankGroup
from cpr.checkpoint.config import WRITER_BYTES, CheckpointConfig
from cpr.checkpoint.format.manifest import Kind, Manifest, Moment
from cpr.checkpoint.format.part import table_entry
from cpr.checkpoint.load.model_loader import ModelLoader
from cpr.checkpoint.ownership.records import NO_CLAIMANT, Claimant
from cpr.checkpoint.save.snapshot import RowSelection, Snapshot, select_rows, shards_named
from cpr.checkpoint.save.stager import Stager, seconds_left
from cpr.checkpoint.save.staging import StagingPool, rows_per_piece
from cpr.checkpoint.save.writer_thread import Save, WriterThread, is_crowded
from cpr.checkpoint.state.changes import UNCHANGED, Changes
from cpr.checkpoint.state.model_state import (
    CapturedState,
    Heir,
    ModelState,
    RandomGenerators,
    Stateful,
)
from cpr.checkpoint.state.optimizer_state import OptimizerState
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
from cpr.shards import before_updates, find_shards
from cpr.shards.optimizers import ordinary, without_fused
from cpr.shards.shard import TableShard

__all__ = ["CheckpointConfig", "Checkpointer", "Loaded"]

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that `Checkpointer.close` waits for each background thread."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of `Checkpointer.load`."""

    state: State
    rejected: Sequence[Rejected]
    """Newer saves that were not loaded, with the reason."""
    same_ranks: bool
    """Whether as many ranks saved the state; then per-rank state (random generators) was loaded, too."""
    bytes_read: int
    """Bytes of tables that this rank has read."""
    seconds: float


@dataclass(frozen=True)
class SaveRequest:
    """The save that a rank is about to begin, for all ranks to compare."""

    kind: Kind
    moment: Moment
    step: int
    is_ready: bool
    """Whether the previous save is finished on this rank."""
    replicated: Mapping[str, Tensor]
    """Rows of replicated shards by the shard's name; each rank names those that it has touched."""
    problem: Exception | None
    """Why this rank cannot begin the save; None: it can."""


def agree(own: SaveRequest, requests: Sequence[SaveRequest]) -> bool:
    """Whether all ranks can begin the same save now; a rank that began another would mix two up.

    Raises:
        ValueError: the ranks request different saves.
        CheckpointError, FloatingPointError: the problem of some rank.
    """
    problems = [request.problem for request in requests if request.problem is not None]
    if problems:
        raise own.problem or problems[0]
    if len({(request.kind, request.moment, request.step) for request in requests}) > 1:
        asked = "; ".join(f"rank {rank}: {each.kind}, step {each.step}" for rank, each in enumerate(requests))
        raise ValueError(f"ranks ask for different saves: {asked}. Call save() alike on all of them")
    return all(request.is_ready for request in requests)


class Checkpointer:
    """Saves a sharded model in the background while it trains, and loads it on any number of ranks.

    All ranks make the same calls in the same order, in the training thread. Training waits while rows are
    copied, and for the previous save if that is not finished (`CheckpointConfig.when_busy`): encoding,
    writing and committing happen in a thread. Rows of fused tables on the CPU are copied during the next
    forward pass, before the backward pass changes them; code that changes tables in another way calls
    `settle` first.

    Methods that use the directory raise `CheckpointError` if it cannot be read or written, and `LockedError`
    if another live run owns it. The failure of a save in the background is raised once, by the next call of
    `step`, `wait`, `wait_until_idle`, `is_free`, `save`, `save_rows` or `close`, as a `SaveFailedError` that
    names the file.

    Args:
        model: holds TorchRec's sharded embeddings, such as `DistributedModelParallel`.
        config: how to save.
        optimizers: ordinary optimizers that update tables, as data-parallel tables have: rows are saved with
            their state. Fused optimizers need not be named.
        claimant: session and generation of these workers, for the ownership of the directory.
        storage: the checkpoint directory; None: open `config.uri`.
        timeout: how long training waits for the slowest rank to begin a save; loading waits at least an hour,
            and the background a day.
        before_save: called before each save; if it raises on any rank, nothing is saved, and the error is
            raised on all ranks (`FloatingPointError`, `ValueError` and `CheckpointError` unchanged). For
            example, a save of NaN must not push out older, sound saves.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CheckpointConfig,
        optimizers: Sequence[Optimizer] = (),
        *,
        claimant: Claimant = NO_CLAIMANT,
        storage: Storage | None = None,
        timeout: timedelta = LONGEST_STEP,
        before_save: Callable[[], object] | None = None,
    ) -> None:
        self._config = config
        self._storage = storage or open_storage(config.uri)
        table_optimizers = ordinary(optimizers)
        self.shards = find_shards(model, table_optimizers)
        """All table shards on this rank."""
        for shard in self.shards:
            rows_per_piece(shard.columns)  # raises if not even one row fits
        self._before_save = before_save
        self._state = ModelState(model)
        self._state.register("random_generators", RandomGenerators(), per_rank=True)
        self.agreement = RankGroup(timeout)
        """Group for short collectives of the training thread between calls of the checkpointer."""
        self._group = RankGroup(max(timeout, LONGEST_LOAD))
        self._loader = ModelLoader(self._group, self.shards, table_optimizers, self._state)
        self.ownership = Ownership(self._storage, self._group, claimant)
        """Ownership of the directory, taken by `claim`."""
        self._background_group = RankGroup(LONGEST_SAVE)
        on_gpu = any(shard.weights.is_cuda for shard in self.shards)
        self._pool = StagingPool(config.host_memory_bytes - WRITER_BYTES, pinned=on_gpu)
        self._is_crowded = is_crowded() and not on_gpu
        self.steps_done = 0
        """Training steps done: calls of `step`, including those before the loaded state."""
        self._is_closed = False
        self._manifests: ManifestCache = {}  # read once per restart; emptied by `prepare`
        self._loaded: State | None = None
        self._rejected: frozenset[int] = frozenset()
        self._committer: Committer | None = None
        self._writer: WriterThread | None = None
        self._warm_up: Thread | None = None
        self._save: Save | None = None
        self._stager = Stager(self._pool)
        self._hooks = before_updates(model, (), self._stager.settle)

    @property
    def uri(self) -> str:
        """URI of the directory, without credentials."""
        return self._storage.uri

    @property
    def state(self) -> ModelState:
        """Dense parameters and registered states."""
        return self._state

    @property
    def newest_step(self) -> int | None:
        """Training steps done in the newest state of this run; None before the first save or load."""
        newest = self._newest_save
        return None if newest is None else newest.step

    @property
    def saved_moment(self) -> int | None:
        """As `newest_step`, but None if that state holds rows of different steps."""
        newest = self._newest_save
        if newest is None or newest.kind != "base" or newest.moment != "consistent":
            return None
        return newest.step

    @property
    def _newest_save(self) -> Manifest | None:
        if self._committer is not None:
            chain: Sequence[Manifest] = self._committer.chain
        else:
            chain = () if self._loaded is None else self._loaded.saves
        return chain[-1] if chain else None

    @property
    def has_base(self) -> bool:
        """Whether this rank's shards can be saved by `save_rows`: see there. False before `prepare`.

        Only valid while no save is running.
        """
        if self._committer is None:
            return False
        try:
            self._check_base(self.shards)
        except (ValueError, MismatchError):
            return False
        return True

    def register(
        self, name: str, state: Stateful | Heir, *, per_rank: bool = False, optional: bool = False
    ) -> None:
        """Save and load an object with the model; called before the first save or load.

        Args:
            name: of the object in the checkpoint.
            state: has `state_dict` and `load_state_dict`. Of a TorchRec `CombinedOptimizer`, fused parts are
                left out: their state is saved with the rows of their tables.
            per_rank: whether the state differs by rank: each rank saves its own and loads it at the same
                world size; at another one, only an `Heir` is loaded, from the states of several ranks.
                Otherwise the state is equal on all ranks, and rank 0 saves it.
            optional: whether the object stays unchanged if the loaded checkpoint lacks it, which is an error
                otherwise.

        Raises:
            ValueError: the name is taken, or `state` is an optimizer that wraps a fused one.
        """
        if isinstance(state, Optimizer):
            state = OptimizerState(without_fused(state) or CombinedOptimizer([]))
        self._state.register(name, state, per_rank, optional)

    def create_optimizer_state(self, columns: Mapping[str, Collection[str]]) -> None:
        """Have lazy optimizers create the state that is about to be loaded: columns by table."""
        self._loader.create_optimizer_state(columns)

    def claim(self) -> None:
        """Take the directory for this run; otherwise the first save does.

        Called before `load`, it makes sure that no other run saves between the two.
        """
        self._check_open()
        self.ownership.claim()

    def finish(self) -> None:
        """Record in the directory that the run has finished, after its last save is committed.

        Workers that are restarted later see the record and exit. Called by all ranks; durable on return.
        """
        self.ownership.finish(self.steps_done)

    def prepare(self) -> None:
        """Get ready to save: claim the directory, list its saves, allocate memory; else the first save does.

        Raises:
            MismatchError: the directory holds saves that this run has not loaded.
        """
        if self._committer is not None:
            return
        self.claim()
        # A run that continues keeps the id of the saves that it builds on: a chain never mixes two runs.
        run_id = self.ownership.run_id if self._loaded is None else self._loaded.newest.run_id
        found = sweep_and_list(
            self._storage, self._group, run_id, self._loaded, self._rejected, self._manifests
        )
        self._manifests.clear()  # the committer knows them now; keeping deleted ones would leak memory
        self._committer = Committer(
            storage=self._storage,
            group=self._background_group,
            lock=self.ownership.lock,
            retention=self._config.retention,
            merge_after=self._config.merge_after,
            run_id=run_id,
            epoch=self.ownership.epoch,
            next_sequence=found.next_sequence,
            committed=list(found.committed),
            chain=self._chain_of_model(),
        )
        self._writer = WriterThread(self._storage, self._pool, self._background_group, self._committer)
        num_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in self._written_here())
        self._warm_up = Thread(
            target=self._pool.warm_up, args=(num_bytes,), name="checkpoint-warm-up", daemon=True
        )
        self._warm_up.start()

    def load(self, *, step: int | None = None, changes: Changes = UNCHANGED) -> Loaded | None:
        """Load the newest state that verifies on every rank; None if nothing was ever saved.

        A save that does not verify is skipped with a warning that says why. A refused state changes nothing;
        if rows turn out to be damaged while they are read, and no older state loads, tables hold a mixture.

        Args:
            step: load the newest state of this training step, one of `all_steps`, instead. Newer saves stay
                in the directory, uncounted by this run's retention; the next save becomes the newest state.
            changes: what the model may have that differs from the save; only for a model that is as it was
                built. The log lists what does differ.

        Raises:
            ValueError: there is no state of `step`; lists the steps that there are. Or changes were allowed
                for a model that has been trained or saved.
            MismatchError: the saves are of another model; names the difference.
            NoUsableStateError: there are saves, but none loads; lists the reasons.
        """
        self._check_open()
        if changes != UNCHANGED and (self.steps_done or self._committer is not None):
            raise ValueError(
                "changes are for a model that is as it was built, so that new rows have their "
                "initial values: build the model again, and load then"
            )
        began = time.perf_counter()
        self.wait_until_idle()
        found = load_newest(
            self._storage,
            self._group,
            lambda state: self._loader.load(self._storage, state, changes=changes),
            step=step,
            cache=self._restart_cache(),
        )
        if found is None:
            return None
        state, (bytes_read, self.steps_done), rejected = found
        self._loaded, self._rejected = state, frozenset(entry.sequence for entry in rejected)
        if self._committer is not None:
            self._committer.go_back_to(state, self._rejected)
        return Loaded(
            state=state,
            rejected=tuple(rejected),
            same_ranks=self._loader.has_same_ranks(state),
            bytes_read=bytes_read,
            seconds=time.perf_counter() - began,
        )

    def all_steps(self) -> list[int]:
        """Steps of the states that can be loaded according to the manifests, ascending. Collective."""
        self._check_open()
        cache = self._restart_cache()
        return on_rank_0(
            self._group, lambda: sorted({state.step for state in own_states(self._storage, cache)[0]})
        )

    def warm_start(self, uri: str, states: Collection[str], changes: Changes = UNCHANGED) -> State:
        """Start from the model of another run: tables with optimizer state, and dense parameters.

        Of the registered states only the named ones are loaded. `steps_done` and the saves of this run start
        at 0. The other directory, which may be of another number of ranks, is only read. Collective; called
        before the first step.

        Args:
            uri: of the other run's checkpoint directory.
            states: names of registered states, the same on all ranks, see `register`.
            changes: what the model may have that differs from the other run's; the log lists what does.

        Returns:
            The loaded state, the newest that verifies.

        Raises:
            NothingSavedError: nothing was ever saved in the other directory.
        """
        self._check_open()
        storage = open_storage(uri)
        found = load_newest(
            storage, self._group, lambda state: self._loader.load(storage, state, states, changes)
        )
        if found is None:
            raise NothingSavedError(
                f"nothing was ever saved in {storage.uri}: a warm start needs a run that has saved"
            )
        return found[0]

    def newest_state(self) -> State | None:
        """The newest state of the directory according to its manifests; None if there is none. Collective."""
        self._check_open()
        return find_newest(self._storage, self._group, self._restart_cache())[0]

    def registered_in(self, state: State, name: str) -> Any:
        """Read a registered state that is equal on all ranks, without loading it. Collective.

        Args:
            state: of this directory, see `newest_state`.
            name: see `register`.

        Raises:
            CheckpointError: the state was not saved, or cannot be read.
        """

        def read() -> Any:
            common = self._loader.read_common(self._storage, state)
            if name not in common["registered"]:
                raise CorruptFileError(f"save {state.sequence} of {self._storage.uri} holds no {name!r}")
            return common["registered"][name]

        self._check_open()
        return on_rank_0(self._group, read)

    def continue_live(self, steps_done: int) -> tuple[State | None, Sequence[Rejected]]:
        """Continue with a live model that is ahead of what is saved: load nothing, and save on top of that.

        Called by all ranks, instead of `load`, before anything is saved.

        Args:
            steps_done: training steps of the live model.

        Returns:
            The newest state, which row saves build on, and newer saves that are damaged: rows that changed
            since one of those may be missing in the next row save.
        """
        self._check_open()
        assert self._committer is None, "must be called before the first save"
        state, rejected = find_newest(self._storage, self._group, self._restart_cache())
        self._loaded, self._rejected = state, frozenset(entry.sequence for entry in rejected)
        self.steps_done = steps_done
        return state, rejected

    def load_shards(
        self,
        names: Sequence[str],
        ranges: Mapping[str, Sequence[tuple[int, int]]] | None = None,
        *,
        ahead_of: tuple[int, bool] | None = None,
    ) -> tuple[State, int, Sequence[Rejected]]:
        """Load some shards of this rank from the newest state in which they verify; reads no others.

        Not collective: one worker can restore its lost rows alone. All other state stays unchanged.

        Args:
            names: of the shards, see `TableShard.name`.
            ranges: by shard, the row ids of the table to load, from first to before last; other rows stay
                unchanged, and their chunks are not read. None: all rows.
            ahead_of: training steps done by the model that the shards belong to, and whether the next step
                has begun to change it: states with newer rows are skipped; None: none are.

        Returns:
            The state, the bytes read, and newer saves that were skipped, with the reason.

        Raises:
            ValueError: this rank has no such shard or rows.
            NothingSavedError: nothing was ever saved.
        """
        shards = shards_named(self.shards, names)
        if ranges is not None:
            shards = [
                each.narrow(*rows) for each in shards for rows in ranges.get(each.name, [each.extent.rows])
            ]
        self.settle()

        def attempt(state: State) -> int:
            if ahead_of is not None:
                steps_done, interrupted = ahead_of
                if max(state.step, state.newest_row_step - interrupted) > steps_done:
                    newest = max(state.step, state.newest_row_step)
                    raise CorruptFileError(
                        f"it has rows of step {newest}, and the model is at step {steps_done}"
                    )
            return self._loader.load_part(self._storage, state, shards)

        found = load_newest(self._storage, Alone(), attempt, cache=self._restart_cache())
        if found is None:
            raise NothingSavedError(
                f"nothing was ever saved in {self._storage.uri}: save once before shards can come from there"
            )
        return found

    def save(self, moment: Moment = "rolling", *, timeout_s: float | None = None) -> Save | None:
        """Begin a full checkpoint (a base): all shards, and all registered states as of now.

        Args:
            moment: `consistent` copies every row before it changes, so that the save is of this moment
                (needed for an exact resume); `rolling` copies some rows in the forward pass of each of the
                next steps, so that a row and its optimizer state are of one moment, but different rows of
                different steps (enough for partial recovery).
            timeout_s: time limit of a consistent save: if waiting for the previous save and copying take
                longer on some rank, the save is given up, which is no failure.

        Returns:
            The save; None if it was skipped because another is running.

        Raises:
            MismatchError: the directory holds saves that this run has not loaded.
        """
        return self._begin("base", moment, None, timeout_s)

    def save_rows(self, rows: Mapping[str, Tensor], *, began: float | None = None) -> Save | None:
        """Begin a delta checkpoint (a row save): these rows, and all registered states, as of now.

        Args:
            rows: row ids of the table by `TableShard.name`, any integer dtype and order; may be empty. Of
                replicated tables, the rows that any rank names are saved.
            began: by `time.perf_counter`, when training began to wait for the choice of rows; None: now.

        Returns:
            The save; None if it was skipped because another is running.

        Raises:
            ValueError: there are no such shards or rows, or no full checkpoint to build on.
            MismatchError: the full checkpoint is of another sharding plan or optimizer; save a new one.
        """
        return self._begin("rows", "consistent", rows, began=began)

    def step(self) -> None:
        """Note that a training step is complete; a rolling save copies some rows until they change."""
        self.settle()
        self.steps_done += 1
        self._raise_failure()
        self._stager.copy_some(self.steps_done)

    def settle(self) -> None:
        """Wait until rows that a running save still needs are copied, so that tables may change.

        Not collective. Called automatically before fused optimizers update tables.
        """
        self._stager.settle()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the running save is committed. Called by all ranks, which get the same result.

        Args:
            timeout_s: time limit. Rows that are not copied by then on some rank are given up; a save that is
                only still being written may be committed later. No failure is raised for it then.

        Returns:
            Whether the save is committed, or none was running.
        """
        self._wait_here(None if timeout_s is None else time.monotonic() + timeout_s)
        save = self._save
        outcomes = self.agreement.gather(None if save is None else save.outcome)
        if save is not None and True in outcomes:
            save.wait()  # another rank knows of the commit, and this one will at once
        elif save is not None:
            save.is_excused = True
        for outcome in outcomes:
            if isinstance(outcome, SaveFailedError):
                raise outcome
        return False not in outcomes or True in outcomes

    def _wait_here(self, deadline: float | None) -> None:
        """Copy remaining rows, and wait for the outcome of the save on this rank, or the deadline."""
        if self._save is not None:
            self._save.hurry.set()
        self._stager.finish(self.steps_done, deadline)
        if self._save is not None:
            self._save.wait(seconds_left(deadline))

    def wait_until_idle(self, deadline: float | None = None) -> bool:
        """Wait until the running save is committed, and compaction and retention after it are finished.

        Args:
            deadline: by `time.monotonic`; rows that are not copied by then are given up.

        Returns:
            Whether all that is finished.
        """
        self._wait_here(deadline)
        self._raise_failure()
        idle = self._save is None or self._save.wait_until_over(seconds_left(deadline))
        self._raise_failure()
        return idle

    def is_free(self) -> bool:
        """Whether no rank is saving, compacting or deleting. Called by all ranks."""
        is_free = all(self.agreement.gather(self._save is None or self._save.is_over))
        if is_free:
            self._raise_failure()
        return is_free

    def close(self, *, abandon: bool = False) -> None:
        """Finish the running save and release the directory; nothing can be saved afterwards.

        Args:
            abandon: give the running save up instead; older saves are untouched.

        Raises:
            SaveFailedError: the save failed; the directory is released all the same.
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
        """Close; after an error, which `sys.exit(0)` is not, abandon the running save."""
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
        # A problem of this rank travels in the request: raised here, it would leave other ranks waiting.
        selections, states, request = self._make_request(kind, moment, rows, deadline)
        requests = self.agreement.gather(request)
        if not agree(request, requests):
            return None
        if rows is not None:
            selections += self._replicated_selections(requests)
        assert self._writer is not None
        assert states is not None
        save = Save(
            kind,
            moment,
            self._config.codec if kind == "rows" else "exact",
            is_gentle=moment == "rolling" and self._is_crowded,  # in a consistent one training may wait
        )
        self._save = save
        self._stager.begin(save, Snapshot(selections), states)
        save.blocked_s = time.perf_counter() - began  # set already here, as a small save is soon committed
        self._writer.start(save)  # before copying, which may need buffers that the writer releases
        if moment == "consistent":
            self._stager.copy_in_background(self.steps_done, deadline)
        save.blocked_s = time.perf_counter() - began
        return save

    def _prepare_to_save(self) -> None:
        """Call `prepare`; a failure of the storage fails only this save, not the run."""
        try:
            self.prepare()
        except (LockedError, MismatchError):
            raise
        except CheckpointError as error:
            raise SaveFailedError(f"no save can begin in {self._storage.uri}: {error}") from error

    def _make_request(
        self, kind: Kind, moment: Moment, rows: Mapping[str, Tensor] | None, deadline: float | None
    ) -> tuple[list[RowSelection], CapturedState | None, SaveRequest]:
        """Collect what this rank saves, and its request to the other ranks, which carries any error."""
        selections: list[RowSelection] = []
        states: CapturedState | None = None
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
                selections = [RowSelection(shard, None) for shard in self._written_here()]
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
        except Exception as error:  # of a user's state_dict: other ranks may not be able to unpickle it
            problem = SaveFailedError(f"the state cannot be saved: {type(error).__name__}: {error}")
        return selections, states, SaveRequest(kind, moment, self.steps_done, is_ready, replicated, problem)

    def _replicated_selections(self, requests: Sequence[SaveRequest]) -> list[RowSelection]:
        """The rows of replicated shards that any rank has named, on the rank that writes them."""
        selections = []
        for shard in self._written_here():
            asked = [each.replicated[shard.name] for each in requests if shard.name in each.replicated]
            if shard.replicated and asked:
                selections += select_rows([shard], {shard.name: torch.cat(asked)})
        return selections

    def _written_here(self) -> list[TableShard]:
        return [shard for shard in self.shards if self._group.rank == 0 or not shard.replicated]

    def _check_base(self, shards: Sequence[TableShard]) -> None:
        assert self._committer is not None
        if not self._committer.chain:
            raise ValueError("a row save needs a base to build on: call save() first")
        base = self._committer.chain[0]
        extents = {entry.extent for entry in base.rows}
        for shard in shards:
            same_columns = base.tables[shard.table_fqn].columns == table_entry(shard).columns
            if shard.extent not in extents or not same_columns:
                raise MismatchError(
                    f"{shard.name} is no shard of base {base.sequence}, which was saved under another "
                    "sharding plan or optimizer: call save() first, so that row saves have a base of this one"
                )

    def _chain_of_model(self) -> list[Manifest]:
        """The saves that row saves can build on: none if tables have changed since; a collective."""
        here = {shard.table_fqn: shard.table_shape for shard in self.shards}
        live = {fqn: shape for each in self._group.gather(here) for fqn, shape in each.items()}
        if self._loaded is None:
            return []
        saved = {fqn: (each.rows, each.cols) for fqn, each in self._loaded.newest.tables.items()}
        return list(self._loaded.saves) if saved == live else []

    def _restart_cache(self) -> ManifestCache | None:
        """The manifests read so far; None once this run saves, when the committer knows them."""
        return self._manifests if self._committer is None else None

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
            self._warm_up.join(CLOSE_TIMEOUT_S)
        if self._writer is not None and not self._writer.close(CLOSE_TIMEOUT_S):
            return  # the thread is still in a collective or a write; it and the lock end with the process
        self.ownership.release()
        for group in (self._background_group, self._group, self.agreement):
            group.close()
