"""`Checkpointer`: what a training loop holds to save a sharded model while it trains, and to load it."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.checkpoint.chain import Rejected, State
from cpr.checkpoint.codecs import CODECS
from cpr.checkpoint.history import History, place_of
from cpr.checkpoint.loader import load_shards, read_state_file
from cpr.checkpoint.manifest import Kind, Moment
from cpr.checkpoint.model_state import ModelState, Stateful
from cpr.checkpoint.opening import claim, load_newest
from cpr.checkpoint.random_state import RandomGenerators
from cpr.checkpoint.ranks import RankGroup
from cpr.checkpoint.retention import Retention
from cpr.checkpoint.saver import Save, Saver
from cpr.checkpoint.snapshot import Selection, Snapshot, select_rows
from cpr.checkpoint.staging import PIECE_BYTES, StagingPool
from cpr.checkpoint.storage import open_storage
from cpr.errors import CorruptFileError, MismatchError
from cpr.shards import create_state, find_shards
from cpr.shards.shard import TableShard

logger = logging.getLogger(__name__)

ROLLING_BYTES_PER_STEP: Final = 32 * 2**20
"""What a rolling save copies between two training steps at most: a few milliseconds."""
WRITER_BYTES: Final = 64 * 2**20
"""Part of the memory ceiling for what is on its way from the staged rows to the storage."""
LEAVE_S: Final = 5.0
"""How long closing waits for the background thread to end by itself."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How a run saves."""

    uri: str
    """Directory: a path, or any pyarrow file system's URI such as s3://bucket/run."""
    host_memory_bytes: int = 512 * 2**20
    """Ceiling of the extra host memory of a worker. A consistent save makes training wait until what does
    not fit is written; with room for all shards of the worker it waits only for the copy."""
    codec: str = "exact"
    """Of the weights in row saves: exact, fp32, fp16, int8 or int4. Bases are always exact."""
    when_busy: Literal["wait", "skip"] = "wait"
    """A save that is asked for while another is under way waits for it, or is skipped on all ranks."""
    merge_after: int = 8
    """Merge base and row saves into a new base when there are more row saves than this; 0: never."""
    retention: Retention = field(default_factory=Retention)
    """Which states are kept."""

    def __post_init__(self) -> None:
        least = WRITER_BYTES + 2 * PIECE_BYTES
        if self.host_memory_bytes < least:
            raise ValueError(f"host_memory_bytes is {self.host_memory_bytes}; saving needs at least {least}")
        if self.codec not in CODECS:
            raise ValueError(f"codec is {self.codec!r}; choose one of {', '.join(CODECS)}")
        if self.when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy is {self.when_busy!r}; choose wait or skip")
        if self.merge_after < 0:
            raise ValueError("merge_after must not be negative (0: never merge)")


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

    All ranks make the same calls in the same order, in the thread that trains. Rows are copied between two
    training steps (that is all that training waits for); encoding, writing and committing happen in a thread.

    Args:
        model: holds TorchRec's sharded embeddings, such as `DistributedModelParallel`.
        config: how to save.
        optimizers: those of data-parallel tables, so that their rows are saved with their optimizer state.
    """

    def __init__(
        self, model: nn.Module, config: CheckpointConfig, optimizers: Sequence[Optimizer] = ()
    ) -> None:
        self._config = config
        self._storage = open_storage(config.uri)
        self.shards = find_shards(model, optimizers)
        """All table shards on this rank."""
        self._optimizers = optimizers
        self._state = ModelState(model)
        self._state.register("random_generators", RandomGenerators(), per_rank=True)
        self._group, self._background = RankGroup(), RankGroup()
        self._pool = StagingPool(
            config.host_memory_bytes - WRITER_BYTES, any(shard.weights.is_cuda for shard in self.shards)
        )
        self.steps_done = 0
        """Calls of `step`, those before the loaded state included."""
        self._loaded: State | None = None
        self._history: History | None = None
        self._saver: Saver | None = None
        self._save: Save | None = None
        self._rolling: Snapshot | None = None

    @property
    def staged_bytes(self) -> int:
        """Host memory that staging buffers take now."""
        return self._pool.allocated_bytes

    def register(self, name: str, state: Stateful, *, per_rank: bool = False) -> None:
        """Save and load `state` with the model; before the first save or load.

        Args:
            name: of it in the checkpoint.
            state: has `state_dict` and `load_state_dict`.
            per_rank: it differs by rank (each rank saves its own, and gets it back at the same world size);
                otherwise it is the same on all and rank 0 saves it.

        Raises:
            ValueError: the name is taken.
        """
        self._state.register(name, state, per_rank)

    def load(self) -> Loaded | None:
        """Load the newest state that verifies on every rank; None if nothing was ever saved.

        Saves that do not verify are left out with a warning that says why.

        Raises:
            MismatchError: what is saved is not of this model; says what differs.
            NoUsableStateError: there are saves, but none loads; lists why.
        """
        began = time.perf_counter()
        self.wait()
        found = load_newest(self._storage, self._group, self._attempt)
        if found is None:
            return None
        state, (bytes_read, common, own), rejected = found
        self.steps_done = self._state.apply(common, own)
        self._loaded = state
        if self._history is not None:
            self._history.chain = list(state.saves)
        return Loaded(
            state=state,
            rejected=tuple(rejected),
            same_ranks=self._is_from_as_many(state),
            bytes_read=bytes_read,
            seconds=time.perf_counter() - began,
        )

    def claim(self) -> None:
        """Take the directory for this run; the first save does it otherwise.

        Raises:
            LockedError: another run that is alive writes there.
            MismatchError: it holds saves that were not loaded.
        """
        if self._history is not None:
            return
        claimed = claim(self._storage, self._group, self._loaded)
        self._history = History(
            storage=self._storage,
            group=self._background,
            lock=claimed.lock,
            retention=self._config.retention,
            merge_after=self._config.merge_after,
            run_id=claimed.run_id,
            next_sequence=claimed.next_sequence,
            committed=sorted(
                {save.sequence: save for state in claimed.states for save in state.saves}.values(),
                key=lambda save: save.sequence,
            ),
            chain=list(self._loaded.saves) if self._loaded else [],
        )
        self._saver = Saver(self._storage, self._pool, self._background, self._history)
        num_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in self._written_here())
        self._warm_up = Thread(
            target=self._pool.warm_up, args=(num_bytes,), name="checkpoint-warm-up", daemon=True
        )
        self._warm_up.start()

    @property
    def newest_step(self) -> int | None:
        """Training steps done in the newest state of this run that counts; None before the first."""
        history = self._history
        return history.chain[-1].step if history is not None and history.chain else None

    def save(self, moment: Moment = "rolling", *, timeout_s: float | None = None) -> Save | None:
        """Begin a full save: all shards and all registered state.

        Args:
            moment: `consistent` copies everything now, so that the save is this moment (what exact resume
                needs); `rolling` copies a little in each of the next `step` calls, so that a row and its
                optimizer state are from one moment, but different rows from different steps (what partial
                recovery needs).
            timeout_s: give a consistent save up if copying, or waiting for the save before it, takes longer.

        Returns:
            The save; None if it was skipped because another is under way.

        Raises:
            SaveFailedError: an earlier save failed in the background.
        """
        selections = [Selection(shard, None) for shard in self._written_here()]
        return self._begin("base", moment, selections, timeout_s)

    def save_rows(self, rows: Mapping[str, Tensor]) -> Save | None:
        """Begin a row save: these rows, with their optimizer state, and all registered state, as of now.

        Args:
            rows: row ids of the table by `TableShard.name`, any integer dtype and order; nothing is fine.

        Returns:
            The save; None if it was skipped because another is under way.

        Raises:
            SaveFailedError: an earlier save failed in the background.
            ValueError: unknown shards or rows, or there is no base to build on.
        """
        selections = select_rows(self.shards, rows)
        written = {shard.name for shard in self._written_here()}
        return self._begin("rows", "consistent", [each for each in selections if each.shard.name in written])

    def step(self) -> None:
        """A training step is complete: rows, dense parameters and registered state belong together.

        Raises:
            SaveFailedError: a save failed in the background; names the file.
        """
        self.steps_done += 1
        self._raise_failure()
        if self._rolling is not None:
            self._copy(ROLLING_BYTES_PER_STEP, wait=False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save that is under way is committed; whether it is.

        Args:
            timeout_s: wait no longer; what is not copied by then is given up, so that the save will fail.

        Raises:
            SaveFailedError: it failed; names the file.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._rolling is not None:
            self._copy(None, wait=True, deadline=deadline)
        done = self._save is None or self._save.wait(_left(deadline))
        self._raise_failure()
        return done

    def close(self, *, abandon: bool = False) -> None:
        """Finish the save that is under way and let go of the directory; nothing can be saved after.

        Args:
            abandon: leave it unfinished instead; older saves are untouched.

        Raises:
            SaveFailedError: the save failed; the directory is let go of all the same.
        """
        try:
            if not abandon:
                self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        """The checkpointer, closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, abandon what is under way."""
        self.close(abandon=kind is not None)

    def _begin(
        self, kind: Kind, moment: Moment, selections: Sequence[Selection], timeout_s: float | None = None
    ) -> Save | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        began = time.perf_counter()
        self._raise_failure()
        self.claim()
        if self._config.when_busy == "skip" and not all(
            self._group.gather(self._save is None or self._save.done)
        ):
            return None
        if not self.wait(_left(deadline)):
            return None
        if kind == "rows":
            self._check_base(selections)
        assert self._saver is not None
        save = Save(kind, moment, self._config.codec if kind == "rows" else "exact")
        self._save, self._rolling = save, Snapshot(selections)
        self._saver.start(save)
        if moment == "consistent":
            self._copy(None, wait=True, deadline=deadline)
        save.blocked_s = time.perf_counter() - began
        return save

    def _copy(self, max_bytes: int | None, wait: bool, deadline: float | None = None) -> None:
        """Copy pieces of the save that is under way, and at its end the rest of the state."""
        assert self._rolling is not None
        assert self._save is not None
        began, copied = time.perf_counter(), 0
        while not (self._rolling.done or self._save.broken.is_set()):
            if max_bytes is not None and copied >= max_bytes:
                break
            buffer = self._pool.acquire(wait, _left(deadline))
            if buffer is None:
                break
            self._save.feed(self._rolling.copy_next(buffer, self.steps_done))
            copied += buffer.numel()
        if self._rolling.done or self._save.broken.is_set():
            self._rolling = None
            self._save.feed(self._state.capture(self.steps_done, self._group.rank, self.shards))
        elif deadline is not None and time.monotonic() >= deadline:
            self._rolling = None
            self._save.cancel()
        self._save.blocked_s += time.perf_counter() - began

    def _attempt(self, state: State) -> tuple[int, Any, Any]:
        for optimizer in self._optimizers:
            create_state(optimizer)  # some make it in their first step only; it must be there
        with torch.no_grad():
            stats = load_shards(self._storage, state, self.shards)
        common = read_state_file(self._storage, state, None)
        if common is None:
            raise CorruptFileError(f"save {state.sequence} of {self._storage.uri} has no state of the run")
        self._state.check(common)
        own = None
        if self._is_from_as_many(state):
            own = read_state_file(self._storage, state, self._group.rank)
        return stats.bytes_read, common, own

    def _is_from_as_many(self, state: State) -> bool:
        return state.newest.world_size == self._group.world_size

    def _written_here(self) -> list[TableShard]:
        return [shard for shard in self.shards if self._group.rank == 0 or not shard.replicated]

    def _check_base(self, selections: Sequence[Selection]) -> None:
        assert self._history is not None
        if not self._history.chain:
            raise ValueError("a row save needs a base to build on: call save() first")
        base = self._history.chain[0]
        places = {place_of(entry) for entry in base.rows}
        for shard in (selection.shard for selection in selections):
            if place_of(shard) not in places:
                raise MismatchError(
                    f"{shard.name} is no shard of base {base.sequence}, which was saved under another "
                    "sharding plan: call save() first, so that row saves have a base of this plan"
                )

    def _raise_failure(self) -> None:
        if self._save is not None and self._save.done and self._save.error is not None:
            error, self._save = self._save.error, None
            raise error

    def _release(self) -> None:
        if self._saver is not None:
            if self._rolling is not None and self._save is not None:
                self._save.cancel()
                self._rolling = None
            self._warm_up.join(LEAVE_S)
            ended = self._saver.close(LEAVE_S)
            if self._history is not None and self._history.lock is not None:
                self._history.lock.release()
            self._saver = None
            if not ended:
                return  # the thread is still in a collective or a write; it ends with the process
        self._background.close()
        self._group.close()


def _left(deadline: float | None) -> float | None:
    """Seconds until then; None: as long as it takes."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
