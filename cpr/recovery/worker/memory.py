"""Shared memory of a worker: segments of dead workers, claimed before the rendezvous, and its own.

`Publisher` publishes a worker's state after every step, for its successor.

Replicated state is all that workers have alike, as one tree that each keeps in shared memory: dense
parameters, registered states, data-parallel tables with their optimizer state, and the counters of all
tables' optimizers. A live tree refers to live tensors; one that was read owns its memory.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup, on_rank
from cpr.checkpoint.format.tree_file import read_state, state_bytes
from cpr.errors import DamagedMemoryError, MismatchError, ResidentMemoryError
from cpr.humanize import size_text
from cpr.processes import Process, launcher_of_this_worker
from cpr.recovery.run.progress import RunProgress
from cpr.rendezvous import HeldSegment, WorkerGroup, WorkerInfo
from cpr.resident.copy_out import SETTLE_S, CopyOut, ExitHook
from cpr.resident.home import LAUNCH_VARIABLE, RUN_ID_VARIABLE, Home, run_key
from cpr.resident.late_state import LateState
from cpr.resident.layout import Layout
from cpr.resident.regions import patiently
from cpr.resident.segment import Segment
from cpr.shards import before_updates
from cpr.shards.shard import TableShard

logger = logging.getLogger(__name__)

ALIVE: Final = "its owner is alive"


def launch_of_this_worker() -> str:
    """Identify the launch of this worker: the `cpr run` above it, or else the torchrun on this host.

    By its launches a run knows its own saves after a failure, and its own end. The session does not tell: a
    launch that loses all memory starts another session. Nor does `--rdzv-id`, which users choose again. A run
    on several nodes has several launches, of which one is enough. Empty if the launcher is gone.
    """
    launcher = launcher_of_this_worker()
    of_agent = f"{socket.gethostname()}-{launcher.pid}-{launcher.start_ticks}" if launcher else ""
    return os.environ.get(LAUNCH_VARIABLE) or of_agent


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A claimed segment of a dead worker: its layout, and how its owner ended."""

    segment: Segment
    layout: Layout
    generation: int
    """The last generation in which the owner trained, or tried to."""
    pid: int
    """The owner's process id."""
    left_ns: int
    """When the owner left by itself; -1: it was killed."""
    heartbeat_ns: int
    reason: str
    has_stopped: bool
    """Whether the owner, or one before, left for good, as when values were not finite."""
    launcher: Process
    """The process that would have restarted the owner."""

    @property
    def age(self) -> tuple[bool, int, int]:
        """Sort key: own memory before mirrors, newest first.

        Steps count only within a generation: a later one may have gone back.
        """
        return self.layout.is_mirror, -self.layout.generation, -self.segment.status.step_finished

    @classmethod
    def from_segment(cls, segment: Segment, layout: Layout) -> "Claimed":
        """Describe a claimed segment by its status page as of now."""
        status = segment.status
        return cls(
            segment=segment,
            layout=layout,
            generation=max(status.generation, layout.generation),
            pid=status.pid,
            left_ns=status.left_ns,
            heartbeat_ns=status.heartbeat_ns,
            reason=status.reason,
            has_stopped=status.has_stopped,
            launcher=Process(status.launcher_pid, status.launcher_start_ticks),
        )


class WorkerMemory:
    """The resident memory of this worker, in the folder of its run.

    Raises:
        ValueError, ResidentMemoryError: shared memory cannot be used; says what to change.
    """

    def __init__(self, uri: str, root: str | None) -> None:
        self.home = Home(run_key(uri), root)
        self.claimed: list[Claimed] = []
        """Best first."""
        self.refused: list[str] = []
        """Memory that was found and not claimed, with the reason."""
        self.segment: Segment | None = None
        """Segment of this worker's tables, after `settle`."""
        self.has_found = False
        """Whether that segment is one that was claimed."""

    def claim(self) -> None:
        """Claim this worker's part of the segments that dead workers left on this node.

        The ranks alone decide which worker claims which segment, so that the workers of a node need not
        communicate. If the node has as many workers as before, each claims the segment of its own local rank,
        and gets the owner's rank if the node keeps its ranks.

        Raises:
            UnreadableMemoryError: some memory still cannot be read after repeated attempts, or was written by
                another version. It is kept and nothing is claimed, so that restarted workers try again.
        """
        rank = int(os.environ.get("RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for segment, layout in patiently(self._find):
            if (layout.rank - rank) % local_size == 0 and patiently(segment.claim):
                self.claimed.append(Claimed.from_segment(segment, layout))
        self.claimed.sort(key=lambda each: each.age)

    def _find(self) -> list[tuple[Segment, Layout]]:
        """Find memory that can be claimed, and note why other memory cannot."""
        found, refused = self.home.find()
        self.refused = [reason for reason in refused if not reason.endswith(ALIVE)]
        sealed = []
        for segment in found:
            try:
                if layout := segment.layout:
                    sealed.append((segment, layout))
            except DamagedMemoryError as error:
                self.refused.append(f"{segment.name}: {error}")
        return sealed

    def info(self) -> WorkerInfo:
        """Describe this worker and its claimed memory for the rendezvous."""
        return WorkerInfo(
            restarted=is_restarted(os.environ, {each.launcher for each in self.claimed}),
            host=socket.gethostname(),
            pid=os.getpid(),
            launch=launch_of_this_worker(),
            held=tuple(
                HeldSegment(
                    session_id=each.layout.session_id,
                    rank=each.layout.rank,
                    world_size=each.layout.world_size,
                    step_finished=each.segment.status.step_finished,
                    generation=each.generation,
                    epoch=each.segment.status.epoch,
                    is_mirror=each.layout.is_mirror,
                )
                for each in self.claimed
            ),
        )

    def settle(self, worker_group: WorkerGroup) -> Segment:
        """Drop memory of other sessions, and choose or create the segment of the new tables.

        Raises:
            ResidentMemoryError: another run may still need memory of another session.
        """
        for each in self.claimed:
            if each.layout.session_id != worker_group.session_id:
                self._drop_foreign(each)
        self.claimed = [each for each in self.claimed if each.layout.session_id == worker_group.session_id]
        mine = (worker_group.world_size, worker_group.rank)
        self.claimed.sort(
            key=lambda each: (
                each.layout.is_mirror,
                (each.layout.world_size, each.layout.rank) != mine,
                each.age,
            )
        )
        self.has_found = bool(self.claimed) and not self.claimed[0].layout.is_mirror
        self.segment = (
            self.claimed[0].segment if self.has_found else self.home.create(f"rank{worker_group.rank}")
        )
        self.segment.status.begin(worker_group.generation)
        return self.segment

    def _drop_foreign(self, claimed: Claimed) -> None:
        segment, launcher = claimed.segment, claimed.launcher
        if launcher.is_alive and launcher != launcher_of_this_worker():
            raise ResidentMemoryError(
                f"{segment.folder} is memory of another run of the same name and checkpoint "
                f"directory, and process {launcher.pid}, which restarts its workers, is alive. "
                "What to do: stop one of the two runs, or give it another --rdzv-id and directory"
            )
        if segment.is_unsaved:
            self.refused.append(f"{segment.name}: of a run that is over and was not saved; kept")
            segment.release()
        else:
            self.refused.append(f"{segment.name}: of a run that is over; removed")
            segment.remove()

    def drop_others(self) -> None:
        """Free all claimed memory but the segment of the tables."""
        for each in self.claimed:
            if each.segment is not self.segment:
                each.segment.remove()
        self.claimed = []

    def remove(self) -> None:
        """Free all memory of this worker, and the run's folder if this worker is the last."""
        self.drop_others()
        if self.segment is not None:
            self.segment.remove()
            self.segment = None
        self.home.remove()


def is_restarted(environment: Mapping[str, str], launchers: Set[Process]) -> bool:
    """Whether this worker knows that it continues a run.

    torchrun counts restarts after failures, but not those after a change of nodes. Then memory tells: the run
    continues if this worker's launcher has also launched an owner of the memory (`launchers`).
    """
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    if environment.get("CPR_CONTINUES") == "1":
        return True
    # Without torchrun the launcher may be a shell, from which a user started a new run.
    return RUN_ID_VARIABLE in environment and launcher_of_this_worker() in launchers


Counters = Mapping[str, Mapping[str, float]]
"""Counters of tables' optimizers, by table and name."""


class Publisher:
    """Keeps a worker's memory ready for its successor, from `restore` to the end of the worker.

    Raises:
        NotEnoughMemoryError: there is no room for copies of tables that do not live in shared memory.
    """

    def __init__(
        self,
        memory: WorkerMemory,
        checkpointer: Checkpointer,
        progress: RunProgress,
        worker_group: WorkerGroup,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> None:
        assert memory.segment is not None
        self._segment: Segment = memory.segment
        self._checkpointer, self._progress, self._worker_group = checkpointer, progress, worker_group
        self.is_unsaved = self._segment.is_unsaved
        """Whether the newest save has failed, so that the memory must be kept."""
        self._saved_before = checkpointer.newest_step
        self._copy_out = CopyOut(self._segment, checkpointer.shards, self._seal)
        self._exits = ExitStack()
        self._exits.enter_context(before_updates(model, optimizers, self._note_update))
        on_gpu = any(shard.weights.device.type == "cuda" for shard in checkpointer.shards)
        self._late = LateState(self._segment.replica, self._note_finished) if on_gpu else None
        if self._copy_out.num_bytes or on_gpu:
            self._copy_out.reserve()
            self._exits.callback(self._copy_out.close)
            loss = f"{size_text(self._copy_out.num_bytes)} of tables; their rows come from the newest save"
            self._exits.enter_context(ExitHook(self._leave, loss))

    @property
    def outside(self) -> Sequence[TableShard]:
        """Sharded tables' shards that do not live in shared memory, such as those on a GPU."""
        return self._copy_out.outside

    def publish(self, at_once: bool = True) -> None:
        """Copy the replicated state into shared memory after a step.

        It counts at once; or, with a GPU, when the next one is published or this worker ends by itself.
        """
        steps_done, tree = self._progress.steps_done, live_tree(self._checkpointer)
        if self._late is not None and not at_once:
            self._late.give(steps_done, tree)
        else:
            if self._late is not None:
                self._late.forget()
            self._segment.replica.write(steps_done, tree)
            self._note_finished(steps_done)
        self._segment.status.beat()

    def mirrored_state(self) -> dict[str, Any]:
        """What a mirror keeps of this worker besides its rows, as of now."""
        return {
            "own": self._checkpointer.state.own(),
            "counters": _counters(self._checkpointer),
            "samples": self._progress.samples_done,
        }

    def note_saves(self, are_failing: bool) -> None:
        """Mark the memory as unsaved while saves fail: then it stays even if the run is not restarted."""
        newest = self._checkpointer.newest_step
        if are_failing and not self.is_unsaved:
            self._segment.mark_unsaved(newest)
            self.is_unsaved, self._saved_before = True, newest
        elif self.is_unsaved and not are_failing and newest != self._saved_before:
            self._segment.clear_unsaved()
            self.is_unsaved = False

    def note_epoch(self) -> None:
        """Record the ownership of the directory, which a save may have claimed only now."""
        if epoch := self._checkpointer.ownership.epoch:
            self._segment.status.epoch = epoch

    def copy_out(self) -> None:
        """Copy tables that do not live in shared memory, if there are any, at the end of training."""
        self._settle()
        try:
            self._copy_out.finish()
        except Exception:
            logger.exception("tables that do not live in shared memory could not be copied there")

    def close(self) -> None:
        """Stop watching the model and the stop signal."""
        self._exits.close()

    def _leave(self) -> None:
        """Complete the memory before a signal ends this worker; called by another thread."""
        self._settle()
        self._copy_out.run()

    def _settle(self) -> None:
        lost = None if self._late is None else self._late.settle(SETTLE_S)
        if lost is not None:
            logger.warning(
                "the GPU does not answer: dense parameters of step %d are lost; those before it count",
                lost,
            )

    def _note_finished(self, steps_done: int) -> None:
        self._segment.status.step_finished = steps_done

    def _note_update(self) -> None:
        self._segment.status.update_begun = self._progress.steps_done + 1

    def _seal(self, shards: Sequence[TableShard]) -> None:
        self._segment.seal(
            session_id=self._worker_group.session_id,
            rank=self._worker_group.rank,
            world_size=self._worker_group.world_size,
            generation=self._worker_group.generation,
            shards=shards,
        )


def live_tree(checkpointer: Checkpointer) -> dict[str, Any]:
    """Make the tree of a model and its registered states as of now."""
    return {
        "common": checkpointer.state.common(checkpointer.steps_done),
        "own": checkpointer.state.own(),
        "replicated": {shard.name: shard.columns for shard in checkpointer.shards if shard.replicated},
        "counters": _counters(checkpointer),
    }


def _counters(checkpointer: Checkpointer) -> dict[str, dict[str, Tensor]]:
    return {shard.table_fqn: dict(shard.counters) for shard in checkpointer.shards}


def share_tree(group: RankGroup, tree: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """Broadcast the newest tree from `source`, which holds it, to the workers that lack it."""
    if all(group.gather(tree is not None)):
        assert tree is not None
        return tree
    file = bytearray()

    def write() -> None:
        assert tree is not None
        file.extend(state_bytes({**tree, "own": {}, "counters": {}}))  # these differ by rank

    on_rank(group, source, write)
    data = torch.frombuffer(file, dtype=torch.uint8) if group.rank == source else None
    received = group.broadcast_bytes(data, source)
    if tree is not None:
        return tree
    shared: dict[str, Any] = read_state(received.numpy().data)
    return shared


@torch.no_grad()
def put_back(
    checkpointer: Checkpointer,
    tree: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    gone: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Put a tree of any worker into the live model: everything but the rows of sharded tables, and counters.

    Per-rank states are `own`, of this very rank if known, and those of ranks that are `gone`, from memory
    that this worker holds.

    Raises:
        MismatchError: the tree is of another model.
    """
    checkpointer.state.check(tree["common"])
    checkpointer.state.apply(tree["common"], own, gone)
    replicated = [shard for shard in checkpointer.shards if shard.replicated]
    checkpointer.create_optimizer_state(
        {each.table_fqn: tree["replicated"].get(each.name, ()) for each in replicated}
    )
    for shard in replicated:
        saved = tree["replicated"].get(shard.name)
        if saved is None:
            raise MismatchError(f"no worker holds the replicated table {shard.table_fqn}")
        for name, column in shard.columns.items():
            if name not in saved or saved[name].shape != column.shape:
                raise MismatchError(f"{name} of {shard.table_fqn} is not as the workers before had it")
            column.copy_(saved[name])
        shard.invalidate()


@torch.no_grad()
def put_counters(checkpointer: Checkpointer, counters: Counters) -> None:
    """Set the known counters of tables' optimizers; after loading rows, which brings older counters."""
    for shard in checkpointer.shards:
        for name, value in counters.get(shard.table_fqn, {}).items():
            if name in shard.counters:
                shard.counters[name].fill_(value)
        shard.invalidate()


def counters_in(tree: Mapping[str, Any]) -> Counters:
    """Extract the counters of a tree as numbers."""
    return {
        table: {name: value.item() for name, value in counters.items()}
        for table, counters in tree["counters"].items()
    }
