"""Execution of a recovery: all ranks together restore the model, from one plan that all of them know."""

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.tree_file import read_state, state_bytes
from cpr.checkpoint.state.changes import UNCHANGED, Changes
from cpr.checkpoint.storage.base import Storage
from cpr.errors import (
    CheckpointError,
    DamagedMemoryError,
    LockedError,
    MismatchError,
    RunStoppedError,
    StartOverError,
    UnreadableMemoryError,
)
from cpr.recovery.decide.assessment import Assessment, Decision, RecoveryPolicy, WorkerReport, assess, decide
from cpr.recovery.decide.comparison import compare
from cpr.recovery.decide.inventory import (
    PROGRESS_STATE,
    Inventory,
    bring_to_steps,
    note_damaged_mirrors,
    refuse_unreadable,
    take_inventory,
)
from cpr.recovery.decide.lineage import Directory
from cpr.recovery.restore.pls_budget import Cost, PlsBudget
from cpr.recovery.restore.transfer import (
    RowTransfer,
    ShardSources,
    losses,
    lost_share,
    origins,
    plan_sources,
    with_chosen,
)
from cpr.recovery.restore.ways import OpenWay, Ways, row_bytes, seconds_per_sample, slowest_rate
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import LIVE, Phases, Recovery, Way
from cpr.recovery.worker.memory import WorkerMemory, live_tree, put_back, put_counters, share_tree
from cpr.rendezvous import WorkerGroup
from cpr.resident.segment import Segment
from cpr.resident.status_page import NOTHING

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Conditions under which these workers start, as known when the model is built."""

    group: WorkerGroup
    resumes: bool
    """Whether a run without live memory may load the saves in its directory."""
    adopted: bool
    """Whether this worker's tables live in memory that was taken over."""
    total_samples: int | None
    storage: Storage
    """The checkpoint directory, with the history of the run."""


@dataclass
class _Restored:
    """What was read and moved, on one rank."""

    save_step: int | None = None
    bytes_read: int = 0
    bytes_moved: int = 0
    load_s: float = 0.0
    move_s: float = 0.0
    passed_over: tuple[str, ...] = ()
    """Newer saves that do not verify, with the reason."""
    rounded: int = 0
    """Rows whose weights are rounded in mirrors that this rank holds."""
    cost: Cost = field(default_factory=Cost)


class Restorer:
    """Restores model, registered states and position, once.

    The checkpointer has everything registered, the progress too, and has saved or loaded nothing.
    `initialize` gives the model its first values, on all ranks where training begins at its beginning; None:
    those it was built with. `changes` may differ between the model and the save that it resumes from.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        group: RankGroup,
        memory: WorkerMemory,
        progress: RunProgress,
        policy: RecoveryPolicy,
        phases: Phases,
        directory: Directory,
        start: Start,
        initialize: Callable[[Checkpointer], object] | None = None,
        changes: Changes = UNCHANGED,
    ) -> None:
        self._checkpointer, self._group, self._memory = checkpointer, group, memory
        self._directory, self._start = directory, start
        self._progress, self._policy, self._phases = progress, policy, phases
        self._initialize, self._changes = initialize or (lambda checkpointer: None), changes
        self._budget = PlsBudget(checkpointer, group, progress, start.total_samples)
        self.restored: dict[str, list[tuple[int, int]]] = {}
        """Row intervals of this rank that came from the checkpoint in a partial recovery, by shard; without
        shards of which some of these rows came from mirrors."""
        self.fell_back = False
        """Whether live rows, or this rank's lost rows, build on an older save than the newest."""
        self._ways = Ways(self._budget, progress)
        self._compared: tuple[Way, ...] = ()
        self._restored_from: int | None = None
        self._restored_epoch = 0
        """Epoch of the ownership under which the restored values were trained."""

    def restore(self) -> None:
        """Recover as the failure, if there was one, requires; afterwards this worker's memory counts.

        The report is the newest of the progress; its seconds are still missing.

        Raises:
            UnreadableMemoryError: a worker's memory cannot be read now; it is kept, for restarted workers.
            RunStoppedError: the previous workers left for good, as when values were not finite.
            NoProgressError: generation after generation died without finishing a step.
            StartOverError: nothing is left to continue with; restarted workers will start over.
            CheckpointError: the checkpoint cannot be read or written; says what to do.
        """
        with self._phases.measured("reattach"):
            own = take_inventory(
                self._memory, self._checkpointer.shards, self._group.rank, self._start.adopted
            )
            reports, found = self._assess(own)
            plan: Sequence[ShardSources] = plan_sources(found.needed, found.held)
            plan = with_chosen(self._group, plan, found.chosen, own.chosen)
            decision = self._decide(found, plan)
        with self._phases.measured("restore"):
            if decision.kind in LIVE:
                decision, found = self._bring_to_steps(decision, found, own)
            tree = self._take_over(decision, found, own)
            done = _Restored(rounded=self._rounded(found, own))
            is_fresh = not any(report.adopted for report in reports)
            if decision.kind in LIVE:
                assert tree is not None
                is_fresh = False
                newest = self._directory.newest
                save_step = None if newest is None else newest.step
                chosen = self._choose(self._ways.find(decision, found, plan, save_step))
                decision, found, plan = chosen.decision, chosen.found, chosen.plan
                if decision.kind in LIVE:
                    decision = self._keep_live(chosen, own, tree, done)
            if decision.kind in {"resume", "full"}:
                self._load_all(done, is_fresh)
            elif decision.kind == "start":
                self._initialize(self._checkpointer)
            self._complete(self._report(decision, found, plan, done))
        segments = [segment for report in reports for segment in report.segments]
        self._phases.add_death(
            [each.left_ns for each in segments if each.left_ns > 0],
            [each.heartbeat_ns for each in segments if each.left_ns < 0],
        )

    def _assess(self, own: Inventory) -> tuple[list[WorkerReport], Assessment]:
        """Assess what is left; a mirror that would be used, and turns out to be damaged, does not count."""
        while True:
            reports = self._group.gather(own.report)
            refuse_unreadable(reports)
            self._refuse_stopped(reports)
            found = assess(reports, self._directory)
            if not found.mirrored or not any(self._group.gather(note_damaged_mirrors(found, own))):
                return reports, found

    @property
    def _segment(self) -> Segment:
        assert self._memory.segment is not None
        return self._memory.segment

    def _refuse_stopped(self, reports: Sequence[WorkerReport]) -> None:
        """End this generation too if the one before left for good: training on would only repeat it."""
        reasons = [each.reason for report in reports for each in report.segments if each.has_stopped]
        if not reasons:
            return
        cause = reasons[0].partition("\n")[0]
        self._segment.status.leave(cause, for_good=True)  # what later workers tell, and not the text below
        newest = self._directory.newest
        raise RunStoppedError(
            f"the run has stopped for good: {cause}. Restarts cannot help: stop the launcher, mend the "
            "cause, and "
            + (f"resume from save {newest.sequence}, step {newest.step}" if newest else "begin a new run")
        )

    def _decide(self, found: Assessment, plan: Sequence[ShardSources]) -> Decision:
        decision = decide(
            found,
            lost_share=lost_share(plan),
            continues=self._start.group.continues,
            resumes=self._start.resumes,
            is_saved=self._directory.newest is not None,
        )
        if decision.kind == "full":
            self._log_full(decision)
        return decision

    def _choose(self, ways: Sequence[OpenWay]) -> OpenWay:
        """Compare what ways cost, and choose one; where there are several, log the comparison."""
        sample_s = seconds_per_sample(self._group, self._start.storage) if len(ways) > 1 else None
        choice = compare([each.way for each in ways], self._policy, sample_s)
        self._compared = choice.ways
        if len(ways) > 1 and self._group.rank == 0:
            logger.info("ways to recover at step %d:\n%s", self._progress.steps_done, choice)
        chosen = ways[choice.ways.index(choice.way)]
        if choice.reason is not None:
            decision = chosen.decision
            reason = f"{choice.reason}; {decision.reason}" if decision.reason else choice.reason
            chosen = replace(chosen, decision=replace(decision, reason=reason))
        if chosen.decision.kind == "full":
            self._log_full(chosen.decision)
        return chosen

    def _log_full(self, decision: Decision) -> None:
        if self._group.rank == 0:
            newest = self._directory.newest
            where = f"save {newest.sequence} of step {newest.step}" if newest else "the beginning"
            logger.warning("all workers go back to %s: %s", where, decision.reason)

    def _bring_to_steps(
        self, decision: Decision, found: Assessment, own: Inventory
    ) -> tuple[Decision, Assessment]:
        """Bring memory and mirrors to the steps that were chosen; if that fails anywhere, all go back."""
        counters, problem = dict[str, Mapping[str, float]](), None
        try:
            counters = bring_to_steps(found, own, self._memory.claimed)
        except (DamagedMemoryError, UnreadableMemoryError) as error:
            problem = str(error)
        counters = dict(ChainMap(*self._group.gather(counters), dict(found.counters)))
        return self._full_if(problem) or decision, replace(found, counters=counters)

    def _take_over(self, decision: Decision, found: Assessment, own: Inventory) -> dict[str, Any] | None:
        """Give the replicated state to all ranks, with its progress brought up to this generation."""
        generation = self._start.group.generation
        self._progress.generation = generation
        if found.slot is None or found.slot_of is None:
            return None
        mine = next((at for at, each in enumerate(own.report.segments) if each.slot == found.slot), None)
        held = None if mine is None else own.trees[mine]
        tree = share_tree(self._group, held, found.slot_of[0])
        self._progress.take_over(tree["common"]["registered"][PROGRESS_STATE])
        self._progress.begin(
            generation, found.endings, found.interrupted, self._policy.max_generations_without_progress
        )
        attempt = Recovery(
            kind=decision.kind,
            reason=decision.reason,
            generation=generation,
            step=self._progress.steps_done,
            dead=found.endings,
            world_size=self._group.world_size,
            pls_total=self._progress.pls_total,
            finished=False,
        )
        self._progress.recoveries = [*self._progress.recoveries, attempt]
        tree["common"]["registered"][PROGRESS_STATE] = self._progress.state_dict()
        if mine is not None:
            # If this attempt dies too, the next one must know of it, and of the interrupted batch.
            self._memory.claimed[mine].segment.replica.write(found.slot.step, tree)
        return tree

    def _keep_live(self, chosen: OpenWay, own: Inventory, tree: dict[str, Any], done: _Restored) -> Decision:
        """Keep live values and load lost rows; if that fails on any rank, decide that all go back."""
        found, plan = chosen.found, chosen.plan
        if own.report.adopted and any(
            each.lost_ranges and each.needed.rank == self._group.rank for each in plan
        ):
            self._segment.unseal()  # adopted rows are about to be overwritten: a death now loses them
        if full := self._full_if(self._put_back(tree, *self._own_states(found, own))):
            return full
        shards = self._checkpointer.shards
        transfer = RowTransfer(self._group, shards, own.columns, own.extents, own.chosen)
        began = time.perf_counter()
        done.bytes_moved = transfer.move(plan)
        done.move_s = time.perf_counter() - began
        if full := self._full_if(self._load_lost(plan, found.interrupted, done)):
            return full
        began = time.perf_counter()
        done.bytes_moved = transfer.move_chosen(plan)
        done.move_s += time.perf_counter() - began
        steps = [step for step in self._group.gather(done.save_step) if step is not None]
        save_step = min(steps, default=None)
        newest = self._directory.newest
        if save_step is not None and newest is not None and save_step != newest.step:
            # the newest save is damaged, so that rows are older than expected
            live = self._ways.keep_live(chosen.decision, found, plan, save_step)
            chosen = self._choose([live, self._ways.go_back(found, plan, save_step)])
            if chosen.decision.kind == "full":
                return chosen.decision
        self._budget.charge(chosen.cost)
        done.cost = chosen.cost
        self._restored_epoch = found.epoch
        put_counters(self._checkpointer, found.counters)
        self._build_on_newest()
        return chosen.decision

    def _build_on_newest(self) -> None:
        """Let the next saves build on the newest state, and forget saves that were never committed."""
        newest, damaged = self._checkpointer.continue_live(self._progress.steps_done)
        sequence, step = (newest.sequence, newest.step) if newest else (None, 0)
        self._progress.forget_saves_after(step)
        self.fell_back = bool(damaged) or self._restored_from not in {None, sequence}

    def _full_if(self, problem: str | None) -> Decision | None:
        """Decide on full recovery if any rank has a problem."""
        problems = [each for each in self._group.gather(problem) if each]
        if not problems:
            return None
        full = Decision("full", problems[0])
        self._log_full(full)
        return full

    def _put_back(
        self, tree: dict[str, Any], own: dict[str, Any] | None, gone: list[dict[str, Any]]
    ) -> str | None:
        """Put the replicated state into place; returns why it does not fit."""
        try:
            put_back(self._checkpointer, tree, own, gone)
        except MismatchError as error:
            return f"live memory does not fit the model: {error}"
        return None

    def _own_states(
        self, found: Assessment, own: Inventory
    ) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Collect per-rank states of the restored step: this rank's (or None), and those of gone ranks.

        A gone rank's state is taken only if the newest generation wrote it. If an older one did, a rank of
        the newest one inherited it in a recovery that died later, and holds it in its own state.
        """
        mine, gone = self._mirrored_states(found, own)
        for report, tree in zip(own.report.segments, own.trees, strict=True):
            if report.slot is None or found.slot is None or not report.slot.is_of_moment(found.slot):
                continue
            place = (report.old_world_size, report.old_rank)
            if place == (self._group.world_size, self._group.rank):
                mine = mine or tree["own"]
            elif report.slot.generation == found.slot.generation:
                gone.setdefault(place, tree["own"])
        return mine, list(gone.values())

    def _mirrored_states(
        self, found: Assessment, own: Inventory
    ) -> tuple[dict[str, Any] | None, dict[tuple[int, int], dict[str, Any]]]:
        """Per-rank states in mirrors of the restored step: this rank's, and those of gone ranks held here."""
        mine: dict[str, Any] | None = None
        held = {
            report.old_rank: tree["own"]
            for report, tree in zip(own.report.segments, own.trees, strict=True)
            if report.is_mirror
            and tree is not None
            and (moment := found.mirrored.get(report.old_rank)) is not None
            and (moment.step, moment.samples) == (self._progress.steps_done, report.samples)
        }
        if found.mirrored and found.old_world_size == self._group.world_size:
            for states in self._group.gather({rank: state_bytes(tree) for rank, tree in held.items()}):
                if (data := states.get(self._group.rank)) is not None:
                    mine = read_state(memoryview(data))
            return mine, {}
        gone = {rank: tree for rank, tree in held.items() if rank not in found.remembered}
        return None, {(found.old_world_size, rank): tree for rank, tree in gone.items()}

    def _rounded(self, found: Assessment, own: Inventory) -> int:
        """Rows whose weights are rounded in mirrors that are used, and that this rank holds."""
        return sum(
            own.trees[at]["mirror"]["rounded"]
            for at, report in enumerate(own.report.segments)
            if report.is_mirror and (self._group.rank, at) in found.brought_to
        )

    def _load_lost(self, plan: Sequence[ShardSources], interrupted: bool, done: _Restored) -> str | None:
        """Load the lost rows of this rank from the checkpoint; returns why they cannot be loaded.

        If training was interrupted, live rows may hold a part of the next step.
        """
        names = {shard.extent: shard.name for shard in self._checkpointer.shards}
        lost = {
            names[each.needed.extent]: each.lost_ranges
            for each in plan
            if each.needed.rank == self._group.rank and each.lost_rows
        }
        if not lost:
            return None
        began = time.perf_counter()
        try:
            state, bytes_read, passed_over = self._checkpointer.load_shards(
                list(lost), lost, ahead_of=(self._progress.steps_done, interrupted)
            )
        except CheckpointError as error:
            return f"lost rows could not be restored: {error}"
        done.save_step, done.bytes_read = state.step, bytes_read
        done.load_s = time.perf_counter() - began
        done.passed_over = tuple(f"save {each.sequence}: {each.reason}" for each in passed_over)
        mirrored = {names[each.needed.extent] for each in plan if each.chosen}
        self.restored = {name: ranges for name, ranges in lost.items() if name not in mirrored}
        self._restored_from = state.sequence
        return None

    def _load_all(self, done: _Restored, is_fresh: bool) -> None:
        """Load the newest checkpoint on all ranks, or begin at the beginning if there is none.

        That, and a checkpoint of other tables, takes a fresh start: on all ranks, model and states are still
        as they were built.
        """
        self._segment.unseal()
        self._progress.start_over()
        began = time.perf_counter()
        try:
            loaded = self._checkpointer.load(changes=self._changes if is_fresh else UNCHANGED)
        except MismatchError:
            if is_fresh or self._changes == UNCHANGED:
                raise
            self._start_over("what was saved is of other tables, and new ones need their initial values")
        if loaded is not None:
            self._restored_epoch = self._directory.owner_epoch
            done.save_step, done.bytes_read = loaded.state.step, loaded.bytes_read
            done.load_s = time.perf_counter() - began
            done.cost = self._budget.charge_for_going_back(loaded.state)
        elif is_fresh:
            self._initialize(self._checkpointer)
        else:
            self._start_over("nothing was saved yet")

    def _start_over(self, why: str) -> NoReturn:
        """Free the memory on all ranks, and leave the rest to restarted workers."""
        self._group.gather(None)
        self._memory.remove()
        raise StartOverError(
            f"what is left in memory is of no use, and {why}: the memory has been freed, so that restarted "
            "workers begin afresh. What to do: nothing, if torchrun has restarts left; otherwise start the "
            "run again"
        )

    def _report(
        self, decision: Decision, found: Assessment, plan: Sequence[ShardSources], done: _Restored
    ) -> Recovery:
        on_all = self._group.gather(done)
        steps = [each.save_step for each in on_all if each.save_step is not None]
        is_live, continues = decision.kind in LIVE, self._start.group.continues
        sizes = row_bytes(plan)
        loaded = {rank: lost if is_live else total for rank, (lost, _, total) in sizes.items()}
        moved = {rank: moved for rank, (_, moved, _) in sizes.items() if is_live}
        return Recovery(
            kind=decision.kind,
            reason=decision.reason,
            generation=self._start.group.generation,
            step=self._progress.steps_done,
            interrupted=is_live and found.interrupted,
            dead=found.endings if continues else (),
            sources=origins(plan) if is_live else (),
            lost_share=lost_share(plan, with_mirrored=True) if continues else 0.0,
            save_step=min(steps, default=None),
            mirror_step=min((each.step for each in found.mirrored.values()), default=None)
            if is_live
            else None,
            mirror_rounded=sum(each.rounded for each in on_all) if is_live and found.mirrored else 0,
            bytes_read=sum(each.bytes_read for each in on_all),
            bytes_moved=sum(each.bytes_moved for each in on_all),
            ways=self._compared,
            load_bytes_per_s=slowest_rate(loaded, [each.load_s for each in on_all]),
            move_bytes_per_s=slowest_rate(moved, [each.move_s for each in on_all]),
            refused=(*found.refused, *dict.fromkeys(text for each in on_all for text in each.passed_over)),
            pls_added=done.cost.pls,
            pls_expected=done.cost.expected,
            pls_total=self._progress.pls_total,
            losses=losses(plan, done.cost.samples, done.cost.pls, done.cost.expected) if is_live else (),
            world_size=self._group.world_size,
        )

    def _complete(self, recovery: Recovery) -> None:
        """Make this worker's memory count, once everything is in place on all ranks."""
        progress = self._progress
        before = [each for each in progress.recoveries if not self._is_attempt(each)]
        progress.recoveries = [*before, recovery]
        self._prepare_to_save()
        segment, worker_group = self._segment, self._start.group
        segment.replica.write(progress.steps_done, live_tree(self._checkpointer))
        segment.status.step_finished = progress.steps_done
        segment.status.update_begun = NOTHING
        segment.forget_past()
        segment.replica.keep(1)  # before mirrors take the room that each step needs
        segment.status.epoch = self._checkpointer.ownership.epoch or self._restored_epoch
        self._group.gather(None)  # no rank reads another's old memory any more
        segment.seal(
            session_id=worker_group.session_id,
            rank=worker_group.rank,
            world_size=worker_group.world_size,
            generation=worker_group.generation,
            shards=self._checkpointer.shards,
        )
        self._group.gather(None)  # all new memory counts before any old memory is freed
        self._memory.drop_others()

    def _is_attempt(self, story: Recovery) -> bool:
        """Whether the report is the preliminary one of this very recovery."""
        return not story.finished and story.generation == self._progress.generation

    def _prepare_to_save(self) -> None:
        """Prepare the checkpointer, unless storage fails: then the first save tries again."""
        if not self._checkpointer.ownership.epoch:
            return
        try:
            self._checkpointer.prepare()
        except (LockedError, MismatchError):
            raise
        except CheckpointError as error:
            if self._group.rank == 0:
                logger.error("%s. Training continues, and saving is tried again", error)
