"""One generation's way back into training, carried out: all ranks together, from one agreed plan."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.errors import CheckpointError, DivergedRunError, LockedError, MismatchError, StartOverError
from cpr.recovery.decide.assessment import Assessment, WorkerReport, assess
from cpr.recovery.decide.decision import Decision, Findings, decide
from cpr.recovery.decide.inventory import COURSE, Inventory, refuse_unreadable, take_inventory
from cpr.recovery.decide.lineage import Directory
from cpr.recovery.decide.transfer_plan import ShardSources, losses, lost_share, origins, plan_sources
from cpr.recovery.restore.pls_budget import Cost, PlsBudget
from cpr.recovery.restore.transfer import RowTransfer
from cpr.recovery.run.phases import Phases
from cpr.recovery.run.policy import RecoveryPolicy
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery
from cpr.recovery.worker.memory import WorkerMemory
from cpr.recovery.worker.replicated_state import live_tree, put_back, put_counters, share_tree
from cpr.resident.segment import Segment
from cpr.resident.status_page import NOTHING

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What is known when the model is built."""

    session_id: str
    generation: int
    rank: int
    world_size: int
    continues: bool
    """Whether workers of this run were at work before."""
    resumes: bool
    """Whether a run without live memory may go on from what is saved."""
    adopted: bool
    """Whether this worker's tables are memory that was taken over."""
    total_samples: int | None


@dataclass
class _Read:
    """What was read from the checkpoint."""

    save_step: int | None = None
    bytes_read: int = 0
    bytes_moved: int = 0
    passed_over: tuple[str, ...] = ()
    """Newer saves that do not verify, with the reason."""
    cost: Cost = field(default_factory=Cost)


class Restorer:
    """Brings model, states and position to where training goes on.

    Args:
        checkpointer: everything is registered, nothing saved or loaded.
        group: all ranks.
        memory: of this worker.
        progress: of the run; registered with the checkpointer.
        policy: how much loss is put up with.
        phases: where time is noted.
        directory: what is known of the checkpoint directory.
        initialize: called where training begins at its beginning, on all ranks; may give the model values.
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
        initialize: Callable[[Checkpointer], object] | None = None,
    ) -> None:
        self._checkpointer, self._group, self._memory = checkpointer, group, memory
        self._directory = directory
        self._progress, self._policy, self._phases = progress, policy, phases
        self._initialize = initialize or (lambda checkpointer: None)
        self.restored: dict[str, list[tuple[int, int]]] = {}
        """Rows of this rank that came from the checkpoint while others went on, by shard."""
        self.fell_back = False
        """Whether live rows go on from, or this rank's lost rows came from, an older save than the newest."""
        self._restored_from: int | None = None
        self._restored_epoch = 0
        """Of the ownership under which what training goes on from was trained."""

    def restore(self, begin: Beginning) -> Sequence[WorkerReport]:
        """Do what the failure, or the lack of one, asks for; afterwards this worker's memory counts.

        The story is the course's newest, its seconds still unknown.

        Returns:
            The reports of all workers.

        Raises:
            UnreadableMemoryError: a worker's memory cannot be read now; it is kept, for restarted workers.
            DivergedRunError: the workers before left because values were no numbers.
            NoProgressError: generation after generation died without finishing a step.
            StartOverError: nothing is left to go on with; restarted workers will begin anew.
            CheckpointError: the checkpoint cannot be read or written; says what to do.
        """
        with self._phases.measured("reattach"):
            own = take_inventory(self._memory, self._checkpointer.shards, begin.rank, begin.adopted)
            reports = self._group.gather(own.report)
            refuse_unreadable(reports)
            self._refuse_diverged(reports)
            found = assess(reports, self._directory)
            plan = plan_sources(found.needed, found.held)
            decision = self._decide(begin, found, plan)
        with self._phases.measured("restore"):
            tree = self._take_over(begin, decision, found, own)
            read = _Read()
            accounts = PlsBudget(
                self._checkpointer, self._group, self._progress, self._policy, begin.total_samples
            )
            is_fresh = not any(report.adopted for report in reports)
            if decision.kind in {"process", "partial"}:
                assert tree is not None
                is_fresh = False
                decision = self._go_on(accounts, decision, found, plan, own, tree, read)
            if decision.kind in {"resume", "full"}:
                self._load(accounts, read, is_fresh)
            elif decision.kind == "start":
                self._initialize(self._checkpointer)
            self._complete(begin, self._told(begin, decision, found, plan, read))
        return reports

    @property
    def _segment(self) -> Segment:
        assert self._memory.segment is not None
        return self._memory.segment

    def _refuse_diverged(self, reports: Sequence[WorkerReport]) -> None:
        """End this generation too if values were no numbers: it would only come to the same again."""
        reasons = [each.reason for report in reports for each in report.segments if each.diverged]
        if not reasons:
            return
        newest = self._directory.newest
        raise DivergedRunError(
            "the run has diverged, and does not go on however often workers are started again: "
            f"{reasons[0]}. What to do: mend the cause, and "
            + (f"resume from save {newest.sequence}, step {newest.step}" if newest else "begin a new run")
        )

    def _decide(self, begin: Beginning, found: Assessment, plan: list[ShardSources]) -> Decision:
        findings = Findings(
            continues=begin.continues,
            resumes=begin.resumes,
            is_saved=self._directory.newest is not None,
            holds_anything=bool(found.old_world_size),
            has_replicated_state=found.slot is not None,
            lost_share=lost_share(plan),
            stale=found.stale,
            objection=found.objection,
        )
        decision = decide(findings, self._policy)
        if decision.kind == "full":
            self._tell_all_go_back(decision)
        return decision

    def _tell_all_go_back(self, decision: Decision) -> None:
        if self._group.rank == 0:
            newest = self._directory.newest
            where = f"save {newest.sequence} of step {newest.step}" if newest else "the beginning"
            logger.warning("all workers go back to %s: %s", where, decision.reason)

    def _take_over(
        self, begin: Beginning, decision: Decision, found: Assessment, own: Inventory
    ) -> dict[str, Any] | None:
        """The replicated state, with the run's course brought up to this generation, on all ranks."""
        self._progress.generation = begin.generation
        if found.slot is None or found.slot_of is None:
            return None
        mine = next((at for at, each in enumerate(own.report.segments) if each.slot == found.slot), None)
        held = None if mine is None else own.trees[mine]
        tree = share_tree(self._group, held, found.slot_of[0])
        self._progress.take_over(tree["common"]["registered"][COURSE])
        self._progress.begin(begin.generation, found.endings, found.interrupted, self._policy)
        attempt = Recovery(
            kind=decision.kind,
            reason=decision.reason,
            generation=begin.generation,
            step=self._progress.steps_done,
            dead=found.endings,
            world_size=begin.world_size,
            pls_total=self._progress.pls_total,
            finished=False,
        )
        self._progress.recoveries = [*self._progress.recoveries, attempt]
        tree["common"]["registered"][COURSE] = self._progress.state_dict()
        if mine is not None:  # whoever dies before the end of this leaves word of what came before
            self._memory.claimed[mine].segment.replica.write(found.slot.step, tree)
        return tree

    def _go_on(
        self,
        accounts: PlsBudget,
        decision: Decision,
        found: Assessment,
        plan: list[ShardSources],
        own: Inventory,
        tree: dict[str, Any],
        read: _Read,
    ) -> Decision:
        """Keep live values; what is lost comes from the checkpoint, or else everybody goes back."""
        if any(each.lost_rows and each.needed.rank == self._group.rank for each in plan):
            self._unseal_if_overwritten(own)
        if full := self._agree_on(self._put_back(tree, *self._own_states(found, own))):
            return full
        mover = RowTransfer(self._group, self._checkpointer.shards, own.columns, own.extents)
        read.bytes_moved = mover.move(plan)
        if full := self._agree_on(self._load_lost(plan, found.interrupted, read)):
            return full
        cost = accounts.cost_of_loss(found, plan, read.save_step)
        if full := self._agree_on(accounts.objection_to(cost)):
            return full
        accounts.charge(cost)
        read.cost = cost
        self._restored_epoch = found.epoch
        put_counters(self._checkpointer, found.counters)
        self._build_on_newest()
        return decision

    def _build_on_newest(self) -> None:
        """Saves that follow build on the newest state; those that were never committed count for nothing."""
        newest, damaged = self._checkpointer.continue_live(self._progress.steps_done)
        sequence, step = (newest.sequence, newest.step) if newest else (None, 0)
        self._progress.forget_saves_after(step)
        self.fell_back = bool(damaged) or self._restored_from not in {None, sequence}

    def _agree_on(self, problem: str | None) -> Decision | None:
        """If any worker has a problem, all go back."""
        problems = [each for each in self._group.gather(problem) if each]
        if not problems:
            return None
        full = Decision("full", problems[0])
        self._tell_all_go_back(full)
        return full

    def _put_back(
        self, tree: dict[str, Any], own: dict[str, Any] | None, gone: list[dict[str, Any]]
    ) -> str | None:
        """Replicated state into place; why it does not fit."""
        try:
            put_back(self._checkpointer, tree, own, gone)
        except MismatchError as error:
            return f"live memory does not fit the model: {error}"
        return None

    def _unseal_if_overwritten(self, own: Inventory) -> None:
        """What was taken over and is about to change must not count if this worker dies meanwhile."""
        if own.report.adopted:
            self._segment.unseal()

    def _own_states(
        self, found: Assessment, own: Inventory
    ) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """What belonged to this very rank after the step from which it goes on, and to ranks that are gone.

        Of the latter, none counts that a recovery has taken over before it died: it is told by who wrote it.
        """
        mine: dict[str, Any] | None = None
        gone: dict[tuple[int, int], dict[str, Any]] = {}
        for report, tree in zip(own.report.segments, own.trees, strict=True):
            if report.slot is None or found.slot is None or not report.slot.is_of_moment(found.slot):
                continue
            place = (report.old_world_size, report.old_rank)
            if place == (self._group.world_size, self._group.rank):
                mine = mine or tree["own"]
            elif report.slot.generation == found.slot.generation:
                gone.setdefault(place, tree["own"])
        return mine, list(gone.values())

    def _load_lost(self, plan: list[ShardSources], interrupted: bool, read: _Read) -> str | None:
        """Rows of this rank that nobody holds; why they cannot be loaded.

        Args:
            plan: where rows come from.
            interrupted: whether the step after the last one had begun, of which live rows may hold a part.
            read: what was read is noted here.
        """
        names = {shard.extent: shard.name for shard in self._checkpointer.shards}
        lost = {
            names[each.needed.extent]: each.lost_ranges
            for each in plan
            if each.needed.rank == self._group.rank and each.lost_rows
        }
        if not lost:
            return None
        try:
            state, bytes_read, passed_over = self._checkpointer.load_shards(
                list(lost), lost, ahead_of=(self._progress.steps_done, interrupted)
            )
        except CheckpointError as error:
            return f"lost rows could not be restored: {error}"
        read.save_step, read.bytes_read = state.step, bytes_read
        read.passed_over = tuple(f"save {each.sequence}: {each.reason}" for each in passed_over)
        self.restored, self._restored_from = lost, state.sequence
        return None

    def _load(self, accounts: PlsBudget, read: _Read, is_fresh: bool) -> None:
        """Everybody goes to the newest checkpoint, or to the beginning if there is none.

        Args:
            accounts: are charged.
            read: what was read is noted here.
            is_fresh: whether all ranks' model and states still are as they were made: nothing was taken over
                or put back.
        """
        self._segment.unseal()
        self._progress.start_over()
        loaded = self._checkpointer.load()
        if loaded is not None:
            self._restored_epoch = self._directory.owner_epoch
            read.save_step, read.bytes_read = loaded.state.step, loaded.bytes_read
            read.cost = accounts.charge_for_going_back(loaded.state)
        elif is_fresh:
            self._initialize(self._checkpointer)
        else:
            self._group.gather(None)
            self._memory.remove()
            raise StartOverError(
                "what is left in memory is of no use, and nothing was saved yet: the memory has been freed, "
                "so that restarted workers begin at the beginning. What to do: nothing, if torchrun has "
                "restarts left; otherwise start the run again"
            )

    def _told(
        self,
        begin: Beginning,
        decision: Decision,
        found: Assessment,
        plan: list[ShardSources],
        read: _Read,
    ) -> Recovery:
        reads = self._group.gather(read)
        steps = [each.save_step for each in reads if each.save_step is not None]
        lives = decision.kind in {"process", "partial"}
        return Recovery(
            kind=decision.kind,
            reason=decision.reason,
            generation=begin.generation,
            step=self._progress.steps_done,
            interrupted=lives and found.interrupted,
            dead=found.endings if begin.continues else (),
            sources=origins(plan) if lives else (),
            lost_share=lost_share(plan) if begin.continues else 0.0,
            save_step=min(steps, default=None),
            bytes_read=sum(each.bytes_read for each in reads),
            bytes_moved=sum(each.bytes_moved for each in reads),
            refused=(*found.refused, *dict.fromkeys(text for each in reads for text in each.passed_over)),
            pls_added=read.cost.pls,
            pls_expected=read.cost.expected,
            pls_total=self._progress.pls_total,
            losses=losses(plan, read.cost.samples, read.cost.pls, read.cost.expected) if lives else (),
            world_size=begin.world_size,
        )

    def _complete(self, begin: Beginning, recovery: Recovery) -> None:
        """Everything is in place on all ranks: this worker's memory counts from now on."""
        progress = self._progress
        progress.recoveries = [
            *(each for each in progress.recoveries if not self._is_attempt(each)),
            recovery,
        ]
        self._prepare_to_save()
        segment = self._segment
        segment.replica.write(progress.steps_done, live_tree(self._checkpointer))
        segment.status.step_finished = progress.steps_done
        segment.status.update_begun = NOTHING
        segment.status.epoch = self._checkpointer.ownership.epoch or self._restored_epoch
        self._group.gather(None)  # nobody needs another's old memory any more
        segment.seal(
            session_id=begin.session_id,
            rank=begin.rank,
            world_size=begin.world_size,
            generation=begin.generation,
            shards=self._checkpointer.shards,
        )
        self._group.gather(None)  # all new memory counts before any old memory goes
        self._memory.drop_others()

    def _is_attempt(self, story: Recovery) -> bool:
        """Whether it tells of this very beginning, from before its end."""
        return not story.finished and story.generation == self._progress.generation

    def _prepare_to_save(self) -> None:
        """Get ready, unless the storage fails: then the first save does it."""
        if not self._checkpointer.ownership.epoch:
            return
        try:
            self._checkpointer.prepare()
        except (LockedError, MismatchError):
            raise
        except CheckpointError as error:
            if self._group.rank == 0:
                logger.error("%s. Training continues, and saving is tried again", error)
