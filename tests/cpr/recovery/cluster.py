"""Simulates machines, clock and storage of a cluster around the real code that decides and commits.

A table has one shard on each of two ranks. A row's value is the list of training steps that went into it,
and the dense parameters are the list of all steps of a run, so it shows at any time whether rows belong to
the run that trains them, and what they have lost. Each node has one worker.
"""

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.committer import Committer, Retention
from cpr.checkpoint.catalog.ownership import Ownership
from cpr.checkpoint.catalog.resolve import find_newest, sweep_and_list
from cpr.checkpoint.collectives import Alone
from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.format.part import RankPart
from cpr.checkpoint.ownership.records import Claimant
from cpr.errors import LockedError, RunFinished, SaveFailedError
from cpr.extent import Extent
from cpr.mirror.copy import MOMENTS_KEPT
from cpr.mirror.undo import UNDO_STEPS
from cpr.recovery.decide.assessment import (
    RecoveryPolicy,
    SegmentReport,
    ShardReport,
    Slot,
    WorkerReport,
    assess,
    decide,
)
from cpr.recovery.decide.comparison import compare
from cpr.recovery.decide.lineage import raise_if_finished, take_directory
from cpr.recovery.restore.pls_budget import PlsBudget
from cpr.recovery.restore.transfer import lost_share, plan_sources
from cpr.recovery.restore.ways import Ways
from cpr.recovery.run.progress import RunProgress, losses_in
from cpr.recovery.run.report import LIVE
from cpr.rendezvous.rank_assignment import HeldSegment, WorkerInfo, assign_ranks
from tests.cpr.checkpoint.saves import MemoryStorage

RANKS = 2
TOTAL_SAMPLES = 10**6
SAMPLES = 100
"""Of a step."""
BYTES = 8
POLICY = RecoveryPolicy(max_lost_share=0.5)


class Frozen(BaseException):
    """The process stands still in the middle of a write."""


class KilledError(Exception):
    """All workers of a run are killed before it has begun."""


class Storage(MemoryStorage):
    """Files in memory; the next write to a path that contains `frozen` stays on its way."""

    def __init__(self):
        super().__init__()
        self.frozen = None
        self.on_its_way = None

    @contextmanager
    def create(self, path):
        sink = SimpleNamespace(data=bytearray())
        sink.write = sink.data.__iadd__
        yield sink
        if self.frozen is not None and self.frozen in path:
            self.on_its_way, self.frozen = (path, bytes(sink.data)), None
            raise Frozen
        self.files[path] = bytes(sink.data)


class Clock:
    """Replaces `time` in the lock: when one run sleeps, time passes for all runs."""

    def __init__(self):
        self.now_s, self.runs = 0.0, []

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for run in self.runs:
            if run.is_alive and not run.is_paused:
                run.renew()


@dataclass(frozen=True)
class Memory:
    """Resident memory of a worker."""

    session_id: str
    generation: int
    epoch: int
    rank: int
    rows: tuple
    dense: tuple
    progress: dict
    past: tuple = ()
    """Older states that it can be brought to, newest first."""

    @property
    def steps(self):
        """Steps that it can be brought to."""
        return tuple(each.progress["steps_done"] for each in (self, *self.past))

    def after(self, older, num_past):
        """This state, with that of `older` and others before in its past."""
        if older is None or (older.rank, older.generation) != (self.rank, self.generation):
            return self
        past = (replace(older, past=()), *older.past) if older.steps[0] < self.steps[0] else older.past
        return replace(self, past=past[:num_past])

    def brought_to(self, step):
        """The state of one of `steps`."""
        return (self, *self.past)[self.steps.index(step)]


@dataclass(eq=False)
class Node:
    """A machine."""

    name: str
    launch: str
    memory: Memory | None = None
    mirror: Memory | None = None
    """Of the other rank, as of the moment that has arrived last."""
    run: "Run | None" = None


@dataclass(eq=False)
class Run:
    """A generation of workers, from their rendezvous to their end."""

    nodes: list
    session_id: str
    generation: int
    ownership: Ownership
    progress: RunProgress = field(default_factory=RunProgress)
    rows: list = field(default_factory=lambda: [()] * RANKS)
    dense: tuple = ()
    kind: str = ""
    history: Committer | None = None
    committing: Manifest | None = None
    stuck: tuple = ()
    """Path and bytes of a write that is on its way."""
    is_alive: bool = True
    is_paused: bool = False

    def renew(self):
        """What the lock's thread does now and then."""
        lock = self.ownership.lock
        try:
            lock._is_recorded()
        except LockedError:
            return
        lock._write(beat=lock._own.beat + 1)

    @property
    def owns(self):
        """Whether it would find that the directory is its own."""
        try:
            self.ownership.check()
        except LockedError:
            return False
        return True


def place(rank):
    return Extent(
        table_fqn="t", table_shape=(2 * RANKS, 1), row_offset=2 * rank, num_rows=2, col_offset=0, num_cols=1
    )


def shard(rank):
    return ShardReport(extent=place(rank), columns=(("weights", "float32", 2),), bytes_per_row=BYTES)


class Cluster:
    """Runs on one checkpoint directory."""

    def __init__(self):
        self.storage, self.clock = Storage(), Clock()
        self.saved = {}
        """Rows, dense parameters and progress of each save, by folder."""
        self._steps, self._names = count(1), count(1)
        self.place = "none"
        """Of the machine that is at work now."""

    def new_node(self):
        """A machine on which a user starts the command."""
        name = f"n{next(self._names)}"
        return Node(name, launch=f"launch of {name}")

    def join(self, nodes, *, restarted, resume=True, dies=False):
        """Start workers on these nodes; returns their run, or raises the error that ends them.

        `dies`: they are killed when memory has been brought to the steps that were chosen.
        """
        infos = [self._info(node, restarted) for node in nodes]
        decision = assign_ranks(infos)
        by_rank = [
            node for _, node in sorted(zip(decision.ranks, nodes, strict=True), key=lambda each: each[0])
        ]
        for node in nodes:
            if node.memory is not None and node.memory.session_id != decision.session_id:
                node.memory = None
            if node.mirror is not None and node.mirror.session_id != decision.session_id:
                node.mirror = None
        worker_group = SimpleNamespace(
            continues=decision.continues,
            infos=infos,
            launches=frozenset(node.launch for node in nodes),
            session_id=decision.session_id,
            rank=0,
        )
        group = Alone()
        self.place = by_rank[0].name
        try:
            raise_if_finished(self.storage, group, worker_group)
        except RunFinished:
            for node in nodes:
                node.memory = node.mirror = None
            raise
        claimant = Claimant(session=decision.session_id, generation=decision.generation)
        ownership = Ownership(self.storage, group, claimant)
        checkpointer = SimpleNamespace(
            ownership=ownership,
            uri="memory",
            newest_state=lambda: find_newest(self.storage, group)[0],
            registered_in=lambda state, name: deepcopy(self.saved[state.newest.folder][2]),
        )
        directory = take_directory(checkpointer, worker_group, resumes=resume)
        run = Run(by_rank, decision.session_id, decision.generation, ownership)
        self._begin(run, worker_group, resume, directory, checkpointer, dies)
        ownership.note_launches(worker_group.launches, continues=resume or worker_group.continues)
        for node in nodes:
            node.run = run
        self.clock.runs.append(run)
        return run

    def train(self, run, steps):
        """All workers of a run finish so many steps."""
        for _ in range(steps):
            step = next(self._steps)
            run.dense = (*run.dense, step)
            run.rows = [(*rows, step) for rows in run.rows]
            run.progress.step(SAMPLES)
            self._publish(run)

    def mirror(self, run, rank):
        """What a rank has now arrives in its mirror on the next node."""
        keeper, memory = run.nodes[(rank + 1) % RANKS], replace(run.nodes[rank].memory, past=())
        keeper.mirror = memory.after(keeper.mirror, MOMENTS_KEPT)

    def save(self, run, *, freeze=None):
        """Save everything; frozen, the whole run stands still while it writes its manifest."""
        if run.history.committed and run.progress.steps_done == run.history.committed[-1].step:
            return
        run.progress.note_save()
        sequence = run.history.next_sequence
        manifest = Manifest(
            run_id=run.history.run_id,
            sequence=sequence,
            epoch=run.history.epoch,
            kind="base",
            parent=None,
            base=sequence,
            moment="consistent",
            step=run.progress.steps_done,
            created="2026-01-01T00:00:00+00:00",
            world_size=RANKS,
            tables={},
            rows=(),
            states=(),
        )
        self.saved[manifest.folder] = (tuple(run.rows), run.dense, run.progress.state_dict())
        self._publish(run)
        self.storage.frozen = freeze
        try:
            run.history.commit(sequence, "base", RankPart(), None, lambda _: manifest)
            run.history.clean_up()
        except Frozen:
            run.is_paused, run.committing = True, manifest
            run.history.next_sequence = sequence + 1
            run.stuck, self.storage.on_its_way = self.storage.on_its_way, None
        except (SaveFailedError, LockedError):
            run.progress.forget_save(run.progress.steps_done)
            self.end(run)  # a save fails here only where the directory is another's
        finally:
            self.storage.frozen = None

    def wake(self, run, *, killed):
        """Continue or kill a run that stood still; its write arrives in both cases."""
        run.is_paused = False
        manifest, run.committing = run.committing, None
        if manifest is not None:
            path, data = run.stuck
            self.storage.files[path] = data
        if killed:
            self.end(run)
        elif manifest is None:
            return
        elif run.owns:
            run.history.committed.append(manifest)
            run.history.chain = [manifest]
        else:
            self.end(run)

    def end(self, run):
        """Its workers end, in whatever way; their memory stays where their nodes do."""
        run.is_alive, run.is_paused = False, False
        for node in run.nodes:
            node.run = None

    def finish(self, run):
        """It has reached its end."""
        self.save(run)
        if run.is_alive and not run.owns:
            self.end(run)
        if run.is_alive:
            run.ownership.finish(run.progress.steps_done)
            for node in run.nodes:
                node.memory = node.mirror = None
            run.ownership.release()
            self.end(run)

    def newest(self):
        """The newest save that counts, if there is one."""
        states, _ = find_states(self.storage)
        return states[0].newest if states else None

    def _info(self, node, restarted):
        held = tuple(
            HeldSegment(
                session_id=memory.session_id,
                rank=memory.rank,
                world_size=RANKS,
                step_finished=memory.progress["steps_done"],
                generation=memory.generation,
                epoch=memory.epoch,
                is_mirror=memory is node.mirror,
            )
            for memory in (node.memory, node.mirror)
            if memory is not None
        )
        return WorkerInfo(restarted=restarted, host=node.name, pid=1, held=held, launch=node.launch)

    def _publish(self, run):
        for rank, node in enumerate(run.nodes):
            memory = Memory(
                run.session_id,
                run.generation,
                run.ownership.epoch,
                rank,
                run.rows[rank],
                run.dense,
                run.progress.state_dict(),
            )
            node.memory = memory.after(node.memory, UNDO_STEPS - 1)

    def _begin(self, run, worker_group, resume, directory, checkpointer, dies):
        """As `cpr.recovery.restore.restorer.Restorer`, with lists instead of tensors."""
        group, progress = Alone(), run.progress
        newest, _ = find_newest(self.storage, group)
        reports = [self._report(rank, node) for rank, node in enumerate(run.nodes)]
        found = assess(reports, directory)
        plan = plan_sources(found.needed, found.held)
        decision = decide(
            found,
            lost_share=lost_share(plan),
            continues=worker_group.continues,
            resumes=resume or directory.is_own,
            is_saved=newest is not None,
        )
        progress.generation = run.generation
        state = None
        if decision.kind in LIVE:
            for (rank, at), step in found.brought_to.items():
                node = run.nodes[rank]
                if node.memory is not None and at == 0:
                    node.memory = node.memory.brought_to(step)
                else:
                    node.mirror = node.mirror.brought_to(step)
            holder = run.nodes[found.slot_of[0]].memory
            progress.take_over(deepcopy(holder.progress))
            progress.begin(run.generation, found.endings, found.interrupted, 10**6)
            if dies:
                node = run.nodes[found.slot_of[0]]
                node.memory = replace(holder, progress=progress.state_dict())
                raise KilledError
            budget = PlsBudget(checkpointer, group, progress, TOTAL_SAMPLES)
            ways = Ways(budget, progress).find(decision, found, plan, newest.step if newest else None)
            choice = compare([each.way for each in ways], POLICY)
            chosen = ways[choice.ways.index(choice.way)]
            decision, plan = chosen.decision, chosen.plan
        run.kind = decision.kind
        if decision.kind in LIVE:
            run.dense, state = holder.dense, newest
            self._put_rows(run, plan, newest)
            budget.charge(chosen.cost)
            progress.forget_saves_after(newest.step if newest else 0)
        elif decision.kind in {"resume", "full"}:
            progress.start_over()
            state = newest
            if newest is not None:
                rows, run.dense, saved_progress = self.saved[newest.newest.folder]
                run.rows = list(rows)
                progress.load_state_dict(deepcopy(saved_progress))
                progress.note_save()
        run_id = run.ownership.run_id if state is None else state.newest.run_id
        seen = sweep_and_list(self.storage, group, run_id, state, frozenset())
        run.history = Committer(
            storage=self.storage,
            group=group,
            lock=run.ownership.lock,
            retention=Retention(),
            merge_after=0,
            run_id=run_id,
            epoch=run.ownership.epoch,
            next_sequence=seen.next_sequence,
            committed=list(seen.committed),
            chain=list(state.saves) if state else [],
        )
        for node in run.nodes:
            node.memory = node.mirror = None  # and the new one is filled
        self._publish(run)

    def _report(self, rank, node):
        memory = node.memory
        return WorkerReport(
            rank=rank,
            host=node.name,
            pid=1,
            segments=tuple(
                _segment(each, is_mirror=each is node.mirror)
                for each in (memory, node.mirror)
                if each is not None
            ),
            shards=(shard(rank),),
            adopted=memory is not None and memory.rank == rank,
        )

    def _put_rows(self, run, plan, newest):
        """Rows to where they are needed: in place, from another node or a mirror, or from the newest save."""
        for sources in plan:
            rank = sources.needed.rank
            if sources.needed.adopted:
                run.rows[rank] = run.nodes[rank].memory.rows
                continue
            (band,) = sources.bands
            if band.sources:
                (source,) = band.sources
                holder = run.nodes[source.rank]
                run.rows[rank] = (holder.mirror if source.is_mirror else holder.memory).rows
            else:
                run.rows[rank] = self.saved[newest.newest.folder][0][rank]


def _segment(memory, *, is_mirror):
    progress = memory.progress
    slot = Slot(
        went_back=progress["went_back"],
        generation=progress["generation"],
        step=progress["steps_done"],
        progress_generation=progress["progress_generation"],
        losses=losses_in(progress),
    )
    return SegmentReport(
        old_rank=memory.rank,
        old_world_size=RANKS,
        generation=memory.generation,
        epoch=memory.epoch,
        step_finished=progress["steps_done"],
        steps=memory.steps,
        update_begun=-1,
        pid=1,
        left_ns=-1,
        heartbeat_ns=1,
        reason="",
        shards=(shard(memory.rank),),
        whole_bytes=2 * BYTES,
        slot=None if is_mirror else slot,
        is_mirror=is_mirror,
        samples=progress["samples_done"] if is_mirror else None,
    )
