"""`PartialRecovery`: the one object that a training loop holds to outlive its workers.

    recovery = cpr.PartialRecovery("/data/checkpoints", save_every_steps=500, total_samples=10**9)
    with recovery:
        recovery.init_process_group("gloo")
        with recovery.building():
            model = DistributedModelParallel(...)
        recovery.restore(model, optimizers=[optimizer], states={"loader": loader})
        for batch in islice(loader, recovery.batches_to_skip, None):
            ...
            recovery.step(samples=global_batch_size)

Sharded tables live in shared memory that outlives the process; all else is copied there after every step.
Started again by torchrun, each worker picks up what is left, and only what nobody holds comes from disk.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cpr.checkpoint.catalog.resolve import find_newest
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import LONGEST_LOAD, RankGroup
from cpr.checkpoint.config import CheckpointConfig
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.ownership.records import Claimant
from cpr.checkpoint.state.model_state import Heir, Stateful
from cpr.checkpoint.state.optimizer_state import OptimizerState
from cpr.checkpoint.storage.base import Storage, is_local, open_storage
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import RunFinished, SaveFailedError, is_failure
from cpr.estimator.history import RunHistory, SaveCost
from cpr.estimator.planning.interval import IntervalRule
from cpr.faults import Injector
from cpr.faults import Plan as FaultPlan
from cpr.launch.finished import note_run
from cpr.priority.config import PriorityConfig
from cpr.recovery.decide.assessment import WorkerReport
from cpr.recovery.decide.inventory import COURSE
from cpr.recovery.decide.lineage import note_launches, raise_if_finished, take_directory
from cpr.recovery.restore.restorer import Beginning, Restorer
from cpr.recovery.run.phases import Phases, note_death, process_began_ns
from cpr.recovery.run.policy import RecoveryPolicy
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery
from cpr.recovery.worker.memory import WorkerMemory
from cpr.recovery.worker.publisher import Publisher
from cpr.rendezvous import WorkerGroup, init_process_group, join
from cpr.resident.allocation import Allocation, allocate_tables
from cpr.resident.janitor import ensure_janitor
from cpr.saving.periodic import Saves
from cpr.saving.setup import Keeper, SavePlan
from cpr.shards.optimizers import ordinary

logger = logging.getLogger(__name__)


class PartialRecovery:
    """Lets training go on when workers or nodes die; works with any `DistributedModelParallel` model.

    All ranks make the same calls in the same order. Leaving its `with` block by an exception keeps this
    worker's memory for the next generation; leaving it normally or by `sys.exit(0)`, or `close`, saves a last
    time and frees it. That, too, all ranks do: one that waits for others in vain fails after the timeout of
    `init_process_group`, and keeps its memory.
    Raise a `FloatingPointError` where values are no numbers: restarted workers then refuse to go on.

    Args:
        checkpoint: directory of the checkpoints, a path or a URI, or how to save as a whole.
        save_every_steps: how often everything is saved in the background; 0: only at the end. Or the rule by
            which the run chooses, and chooses again while it measures what saves cost and how often nodes are
            lost: as often as is next to free, and never less often than keeps the PLS within its target.
        moment: of the periodic saves: "rolling" spreads the copying over steps, "consistent" is one moment.
        priority: save the rows that deserve it most instead of whole tables. `save_every_steps` still means
            whole tables: with a ratio r, saves with a share r of their rows come every r times as many steps.
            The first save, the last one, and one after rows moved between workers hold everything; one that
            is due while another is under way is postponed. What goes back to a row save, or resumes from it,
            has rows of several ages: `pls` counts what they are behind.
        total_samples: that the whole run will train on; without it, PLS is not known.
        policy: how much loss is put up with before everybody goes back to the checkpoint.
        give_up_after_s: for how long periodic saves may fail before that ends the run. They are tried again
            after pauses of 10 s to 10 min, while training goes on. None: for ever, because a run that ends
            saves nothing either.
        resident_root: a memory file system; None: `$CPR_RESIDENT_ROOT`, or `/dev/shm`.
        resume: whether a new run goes on from what is saved in the directory; otherwise only what this
            launch has saved there is ever loaded, after failures.

    Raises:
        ValueError: something is missing or impossible; says what to change.
        ResidentMemoryError: shared memory cannot be used; says what to change.
    """

    def __init__(
        self,
        checkpoint: str | CheckpointConfig,
        *,
        save_every_steps: int | IntervalRule = 0,
        moment: Moment = "rolling",
        priority: PriorityConfig | None = None,
        total_samples: int | None = None,
        policy: RecoveryPolicy | None = None,
        give_up_after_s: float | None = None,
        resident_root: str | None = None,
        resume: bool = True,
    ) -> None:
        self._phases = Phases()
        self._faults = FaultPlan.from_environment()
        self._config = CheckpointConfig(uri=checkpoint) if isinstance(checkpoint, str) else checkpoint
        self._policy, self._resume = policy or RecoveryPolicy(), resume
        self._plan = SavePlan(
            every=save_every_steps,
            moment=moment,
            priority=priority,
            total_samples=total_samples,
            give_up_after_s=give_up_after_s,
        )
        _check(self._config.uri, self._policy, total_samples)
        self._memory = WorkerMemory(self._config.uri, resident_root)
        self._progress = RunProgress()
        self._worker_group: WorkerGroup | None = None
        self._birth: Allocation | None = None
        self._group: RankGroup | None = None
        self._timeout = timedelta()
        self._checkpointer: Checkpointer | None = None
        self._keeper: Keeper | None = None
        self._saves: Saves | None = None
        self._publisher: Publisher | None = None
        self._injector = Injector()
        self._restored_s: float | None = None
        self._is_over = False
        self._has_asked_for_end = False
        self._memory.claim()
        self._phases.add("imports", (time.time_ns() - process_began_ns()) / 1e9)

    @property
    def steps_done(self) -> int:
        """Training steps done, those of earlier generations and resumed runs included."""
        return self._progress.steps_done

    @property
    def samples_done(self) -> int:
        """Samples trained in them, by all ranks."""
        return self._progress.samples_done

    @property
    def batches_to_skip(self) -> int:
        """Batches after the registered states' position whose training was interrupted; mostly 0, or 1."""
        return self._progress.to_skip

    @property
    def batches_done(self) -> int:
        """Batches of the data, trained or skipped: where to go on if no loader's state is registered."""
        return self._progress.batches_done + self._progress.to_skip

    @property
    def pls(self) -> float | None:
        """Portion of lost samples so far; None: not known."""
        return self._progress.pls_total

    @property
    def history(self) -> RunHistory | None:
        """What saves and failures have cost so far, on rank 0 after `restore`; also in the directory."""
        return self._saves.history if self._saves is not None else None

    def take_save_costs(self) -> list[SaveCost]:
        """Bytes and times of the saves that were committed since this was last asked, oldest first."""
        return self._saves.take_costs() if self._saves is not None else []

    @property
    def recoveries(self) -> list[Recovery]:
        """How each generation of workers began, oldest first; the last one is this."""
        return self._progress.recoveries

    @property
    def tables_adopted(self) -> bool:
        """After `building`: whether the tables have live values, which nobody may initialise again."""
        return self._birth is not None and self._birth.adopted

    @property
    def worker_group(self) -> WorkerGroup:
        """What the workers agreed on when they met; after `init_process_group`."""
        return self._met()

    @property
    def memory_folder(self) -> Path:
        """Of this worker's shared memory; after `init_process_group`."""
        self._met()
        assert self._memory.segment is not None
        return self._memory.segment.folder

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves; after `restore`."""
        if self._checkpointer is None:
            raise ValueError("there is no checkpointer yet: call restore() first")
        return self._checkpointer

    def init_process_group(
        self, backend: str | None = None, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        """Meet the other workers and make the default process group, instead of `torch.distributed`'s.

        A node that holds memory gets its old ranks back if it can; `RANK` in the environment is set to the
        new rank. The ranks of a node follow each other in the order of `LOCAL_RANK`.

        Args:
            backend: "gloo", "nccl", or None: torch chooses.
            timeout: for the meeting, and of the group's collectives; so long, too, workers wait for one that
                does not come to a save.

        Raises:
            RendezvousError: not all workers came.
        """
        self._check_open()
        with self._phases.measured("rendezvous"):
            self._worker_group = join(self._memory.info(), timeout)
            self._memory.settle(self._worker_group)
            ensure_janitor(self._memory.home.folder)
            init_process_group(self._worker_group, backend, timeout)
            self._group = RankGroup(max(timeout, LONGEST_LOAD))
            self._timeout = timeout

    def save_to(self, uri: str) -> None:
        """Save in another directory than the one given, which then only tells this run from others.

        For runs whose directory is not known before the workers have met. All ranks call it, between
        `init_process_group` and `building`, in every generation with the same directory.
        """
        self._met()
        self._config = replace(self._config, uri=uri)
        self._end_if_finished()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Build the model in this block: its tables get shared memory, that of the worker before if it fits.

        Raises:
            ValueError: `CPR_FAULTS` asks for failures, and the directory is in an object store.
            NotEnoughMemoryError: there is too little shared memory; says what to change.
            ResidentMemoryError: it cannot be used, or TorchRec lacks what is needed.
        """
        self._check_open()
        self._check_faults()
        worker_group, segment = self._met(), self._memory.segment
        assert segment is not None
        self._end_if_finished()
        with self._phases.measured("build"):
            adopt = not self._must_begin_anew(worker_group) and bool(self._memory.claimed)
            with allocate_tables(segment, adopt=adopt) as birth:
                yield
            self._birth = birth

    def restore(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        states: Mapping[str, Stateful] | None = None,
        per_rank_states: Mapping[str, Stateful | Heir] | None = None,
        before_save: Callable[[], object] | None = None,
        initialize: Callable[[Checkpointer], object] | None = None,
    ) -> Recovery:
        """Bring the model, optimizers and states to where training goes on; once, before the first step.

        Args:
            model: holds the sharded tables; built in `building`.
            optimizers: ordinary ones, of dense parameters and data-parallel tables. Fused parts of TorchRec's
                `CombinedOptimizer` are left out: their state lives with the rows of their tables.
            states: what else training needs, the same on all ranks, by name; has `state_dict` and
                `load_state_dict`. A loader that is read ahead of the steps, as TorchRec's pipelines do, is
                not where training is: leave it out, and go on at `batches_done`.
            per_rank_states: the same, but different on each rank; they come back to the same rank if its
                memory is of the very step from which training goes on, and stay as they are otherwise. What
                has `inherit` (see `cpr.checkpoint.state.model_state.Heir`) takes over those of ranks that are
                gone.
            before_save: called before each save; see `Checkpointer`.
            initialize: called, on all ranks, whenever training begins at its beginning: at first, and after
                failures before anything was saved. The model has the values that it was built with; this may
                give it others, such as those of another run (`Checkpointer.warm_start`).

        Returns:
            The story of this beginning.

        Raises:
            DivergedRunError: the workers before left because values were no numbers.
            NoProgressError: the run does not get anywhere; lists why.
            StartOverError: nothing is left; restarted workers begin anew.
            LockedError: another run uses the directory.
            CheckpointError: the directory cannot be written to, or what is needed from it cannot be read.
        """
        self._check_open()
        worker_group, group = self._met(), self._group
        if self._birth is None:
            raise ValueError("build the model inside `with recovery.building():`, so that its tables outlive")
        assert group is not None
        plain_storage = open_storage(self._config.uri)
        self._injector = self._armed(worker_group, plain_storage)
        storage = self._injector.storage(plain_storage)
        optimizers = ordinary(optimizers)
        checkpointer = self._make_checkpointer(worker_group, storage, model, optimizers, before_save)
        for name, state in (states or {}).items():
            checkpointer.register(name, state)
        for name, owned in (per_rank_states or {}).items():
            checkpointer.register(name, owned, per_rank=True)
        directory = take_directory(checkpointer, worker_group, resumes=self._resume)
        note_run(self._config.uri, self._memory.home.folder)
        is_own = worker_group.continues and directory.is_of_launches(worker_group.launches)
        assert self._memory.segment is not None
        self._keeper = keeper = Keeper(self._plan, checkpointer, self._progress, group)
        with self._phases.measured("restore"):
            keeper.track(model, optimizers, self._memory.segment, self._birth.adopted)
        restorer = Restorer(
            checkpointer,
            group,
            self._memory,
            self._progress,
            self._policy,
            self._phases,
            directory,
            initialize,
        )
        reports = restorer.restore(
            Beginning(
                session_id=worker_group.session_id,
                generation=worker_group.generation,
                rank=worker_group.rank,
                world_size=worker_group.world_size,
                continues=worker_group.continues,
                resumes=self._resume or is_own,
                adopted=self._birth.adopted,
                total_samples=self._plan.total_samples,
            )
        )
        note_launches(checkpointer, worker_group, resumes=self._resume)
        self._publisher = Publisher(
            self._memory, checkpointer, self._progress, worker_group, model, optimizers
        )
        self._note_death(reports)
        recovery = self._progress.note_seconds(self._phases.seconds)
        with self._phases.measured("restore"):
            self._saves = keeper.open(restorer, plain_storage)
        if worker_group.rank == 0:
            for story in self._progress.newest_stories:
                logger.info("%s", story)
        self._restored_s = time.perf_counter()
        return recovery

    def step(self, samples: int) -> None:
        """A training step is complete on this rank: tables, dense parameters and states belong together.

        Args:
            samples: trained in it, by all ranks together.

        Raises:
            SaveFailedError: saves have failed for `give_up_after_s`, or another run owns the directory.
            InjectedError: `CPR_FAULTS` asks for it.
        """
        self._check_open()
        if self._saves is None or self._publisher is None:
            raise ValueError("there is nothing to go on from yet: call restore() first")
        self._progress.step(samples)
        self._note_first_step()
        self._saves.step()
        self._publisher.publish()
        self._saves.save_if_due()
        self._publisher.note_epoch()
        self._publisher.note_saves(self._saves.are_failing)
        self._injector.step(self.steps_done, self._met().rank)

    def note_skipped(self) -> None:
        """One of the `batches_to_skip` was taken from the data and left out, on all ranks.

        Only a `save_now` before the next `step` needs to know: that step, or else `close`, tells as well that
        all of them were left out.

        Raises:
            ValueError: no batch was to be skipped.
        """
        self._progress.note_skipped()

    def save_now(self, timeout_s: float | None = None) -> bool:
        """Save this moment and wait until it is safe; for all ranks, as when training is stopped by somebody.

        The memory stays, because nobody knows here whether workers are started again. Once what would start
        them has ended, it is freed.

        Args:
            timeout_s: give the save up if it takes longer, which is no failure; the shortest of all ranks
                counts. None: never.

        Returns:
            Whether this moment is saved; the same on all ranks.

        Raises:
            SaveFailedError: the save failed; names the file.
        """
        self._check_open()
        if self._saves is None or self._publisher is None:
            raise ValueError("there is nothing to save yet: call restore() first")
        is_saved = self._saves.now(timeout_s)
        self._publisher.note_saves(self._saves.are_failing)
        self._publisher.publish()  # workers that come next know of the save
        return is_saved

    def close(self) -> None:
        """Training has reached its end: save a last time, and free the shared memory.

        Raises:
            SaveFailedError: the last save failed; the memory is kept.
        """
        if self._is_over:
            return
        if self._saves is not None and self._group is not None:
            while self._progress.to_skip:  # of the end of the data
                self._progress.note_skipped()
            self._saves.finish()
            self._group.gather(None)  # all have saved: nobody's memory is needed any more
        self._end()
        self._memory.remove()

    def __enter__(self) -> Self:
        """This object, left at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, keep the memory and leave word of the reason.

        `sys.exit(0)` is no error. If it comes before `restore`, memory that was found is kept all the same.
        """
        if self._is_over:
            return
        if isinstance(error, RunFinished):
            self._end()
            self._memory.remove()
            return
        has_ended = kind is None or self._saves is not None or not self._memory.claimed
        if error is not None and (is_failure(error) or not has_ended):
            self._leave(error)
            return
        try:
            self.close()
        except BaseException as failure:
            self._leave(failure)
            raise

    def _leave(self, reason: BaseException) -> None:
        diverged = isinstance(reason, FloatingPointError)
        if self._memory.segment is not None:
            self._memory.segment.status.leave(_told(reason), diverged)
        if self._publisher is not None and not diverged:
            self._publisher.copy_out()
            self._publisher.note_saves(isinstance(reason, SaveFailedError))
            self._tell_how_to_rescue()
        try:
            if self._checkpointer is not None:
                self._checkpointer.close(abandon=True)
            self._end()
        except Exception as error:  # of a broken group; what broke it is what people must hear of
            logger.warning("not everything could be closed: %s", _told(error))

    def _tell_how_to_rescue(self) -> None:
        assert self._publisher is not None
        if self._publisher.is_unsaved and self._met().rank == 0:
            folder = self._memory.home.folder
            logger.error(
                "what was trained up to step %d is not saved. It stays in memory, in %s on each node, even "
                "if nobody restarts this run. What to do then: `cpr rescue %s --out DIR` saves it into a "
                "checkpoint directory, `cpr clean --yes --unsaved` frees it",
                self._progress.steps_done,
                folder,
                folder.name,
            )

    def _end(self) -> None:
        self._is_over = True
        if self._publisher is not None:
            self._publisher.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._group is not None and dist.is_initialized():
            self._group.close()

    def _make_checkpointer(
        self,
        worker_group: WorkerGroup,
        storage: Storage,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        before_save: Callable[[], object] | None,
    ) -> Checkpointer:
        """What saves this model, its optimizers and the run's course."""
        self._checkpointer = checkpointer = Checkpointer(
            model,
            self._config,
            optimizers,
            claimant=Claimant(session=worker_group.session_id, generation=worker_group.generation),
            storage=storage,
            timeout=self._timeout,
            before_save=before_save,
        )
        checkpointer.register(COURSE, self._progress)
        for number, optimizer in enumerate(optimizers):
            kept = OptimizerState(optimizer, checkpointer.shards)
            checkpointer.register(f"optimizer{number}", kept, optional=kept.has_only_tables)
        return checkpointer

    def _end_if_finished(self) -> None:
        """Leave, with exit code 0, if the run that these workers continue has reached its end meanwhile.

        Raises:
            RunFinished: it has; the memory is freed when this leaves the `with` block.
        """
        if self._has_asked_for_end:
            return
        self._has_asked_for_end = True
        assert self._group is not None
        raise_if_finished(open_storage(self._config.uri), self._group, self._met())

    def _note_death(self, reports: Sequence[WorkerReport]) -> None:
        """The time before this process began, from what the workers before left behind."""
        segments = [segment for report in reports for segment in report.segments]
        note_death(
            self._phases,
            [each.left_ns for each in segments if each.left_ns > 0],
            [each.heartbeat_ns for each in segments if each.left_ns < 0],
            process_began_ns(),
        )

    def _check_faults(self) -> None:
        """Refuse failures that nobody could keep a record of, before a model is built."""
        if self._faults.schedules and not is_local(self._config.uri):
            raise ValueError(
                f"{self._faults.source} needs a checkpoint directory on a file system, not "
                f"{self._config.uri}: what has happened is kept there"
            )

    def _armed(self, worker_group: WorkerGroup, storage: Storage) -> Injector:
        """What makes the failures happen that `CPR_FAULTS` asks for; nothing otherwise."""
        folder = Path(storage.uri) if isinstance(storage, LocalStorage) else None
        return Injector(
            self._faults,
            folder=folder,
            num_ranks=worker_group.world_size,
            memory=self.memory_folder,
            checkpoint=folder,
        )

    def _must_begin_anew(self, worker_group: WorkerGroup) -> bool:
        """Whether memory is lost that nothing can make good; better known before tables are adopted."""
        held = [
            each
            for offer in worker_group.infos
            for each in offer.held
            if each.session_id == worker_group.session_id
        ]
        newest = max(held, key=lambda each: each.generation, default=None)
        if newest is None or {each.rank for each in held} >= set(range(newest.world_size)):
            return False
        assert self._group is not None
        return find_newest(open_storage(self._config.uri), self._group)[0] is None

    def _note_first_step(self) -> None:
        if self._restored_s is None:
            return
        self._phases.add("first_step", time.perf_counter() - self._restored_s)
        self._restored_s = None
        told = self._progress.note_seconds(self._phases.seconds)
        if self._met().rank == 0:
            logger.info("training goes on: the first step took %.2f s", told.seconds["first_step"])

    def _met(self) -> WorkerGroup:
        if self._worker_group is None:
            raise ValueError("the workers have not met: call init_process_group() of this object first")
        return self._worker_group

    def _check_open(self) -> None:
        if self._is_over:
            raise ValueError("this object is closed; make another one")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check(uri: str, policy: RecoveryPolicy, total_samples: int | None) -> None:
    if not uri:
        raise ValueError("no checkpoint directory was given: name one in PartialRecovery(checkpoint=...)")
    if policy.max_pls is not None and total_samples is None:
        raise ValueError("max_pls is a portion of all samples of the run: give total_samples as well")
