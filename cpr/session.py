"""`PartialRecovery`: fault tolerance for a training loop that runs under torchrun.

    recovery = cpr.PartialRecovery("/data/checkpoints", save_every_steps=500, total_samples=10**9)
    with recovery:
        recovery.init_process_group("gloo")
        with recovery.building():
            model = DistributedModelParallel(...)
        recovery.restore(model, optimizers=[optimizer], states={"loader": loader})
        for batch in islice(loader, recovery.batches_to_skip, None):
            ...
            recovery.step(samples=global_batch_size)

Sharded tables live in shared memory that survives the process; all other state is copied there after every
step. When torchrun restarts the workers, each takes over the memory that is left, and only lost rows come
from disk.
"""

import logging
import os
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

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import LONGEST_LOAD, RankGroup
from cpr.checkpoint.config import CheckpointConfig
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.ownership.records import Claimant
from cpr.checkpoint.state.changes import UNCHANGED, Changes
from cpr.checkpoint.state.model_state import Heir, Stateful
from cpr.checkpoint.state.optimizer_state import OptimizerState
from cpr.checkpoint.storage.base import Storage, is_local, open_storage
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import NotEnoughMemoryError, RunFinished, RunStoppedError, SaveFailedError, is_failure
from cpr.estimator.history import RunHistory, SaveCost, SaveEvent
from cpr.estimator.planning.interval import IntervalRule
from cpr.faults import Injector
from cpr.faults import Plan as FaultPlan
from cpr.launch.finished import FOLDER_VARIABLE, note_stopped
from cpr.mirror.config import MirrorConfig, MirrorFigures
from cpr.mirror.mirror import Mirror, start_mirror
from cpr.priority.config import PriorityConfig
from cpr.recovery.decide.assessment import RecoveryPolicy
from cpr.recovery.decide.comparison import AUC_PER_PLS
from cpr.recovery.decide.inventory import PROGRESS_STATE
from cpr.recovery.decide.lineage import (
    has_memory,
    must_start_over,
    note_launches,
    raise_if_finished,
    refuse_unsaved,
    take_directory,
)
from cpr.recovery.restore.restorer import Restorer, Start
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Phases, Recovery, process_began_ns
from cpr.recovery.worker.memory import Publisher, WorkerMemory
from cpr.rendezvous import WorkerGroup, init_process_group, join
from cpr.resident.allocation import Allocation, allocate_tables
from cpr.resident.cleanup import note_run
from cpr.resident.janitor import ensure_janitor
from cpr.saving.periodic import Saves
from cpr.saving.setup import SavesBuilder, SaveSettings
from cpr.shards.optimizers import ordinary

logger = logging.getLogger(__name__)


class PartialRecovery:
    """Lets training survive the death of workers and nodes; works with any `DistributedModelParallel` model.

    All ranks make the same calls in the same order. Leaving the `with` block by an exception keeps this
    worker's memory for its successor. Leaving it normally, by `sys.exit(0)` or by `close` saves a last time
    and frees the memory. All ranks must leave that way: one that waits for others in vain fails after the
    timeout of `init_process_group`, and keeps its memory.
    Raise a `FloatingPointError` when values are not finite: restarted workers then refuse to train on.

    Args:
        checkpoint: directory of the checkpoints (a path or a URI), or all settings of saving.
        save_every_steps: interval of full saves in the background; 0: save only at the end. With a rule, the
            run chooses the interval, and adapts it to the measured cost of saves and to the rate of node
            losses: as often as is nearly free, and often enough to keep the PLS within its target.
        moment: of the periodic saves: "rolling" spreads copying over several steps, "consistent" is one
            moment.
        priority: save the most important rows instead of whole tables. `save_every_steps` keeps its meaning:
            with a ratio r, saves with a share r of the rows come every r times as many steps. The first save,
            the last one, and one after rows moved between workers hold everything. A row save that is due
            while another save is under way is postponed. Loading a row save gives rows of several ages: `pls`
            counts what they are behind.
        total_samples: samples of the whole run; without it, the PLS is unknown.
        mirror: keep a copy of each worker's rows in the memory of another node, so that a lost node loses
            nothing, or a few steps where the network cannot keep up; or, of tables on a GPU, in shared memory
            of the same node, so that a killed worker loses nothing.
        policy: how much loss to accept before all workers go back to the checkpoint.
        give_up_after_s: how long saves may fail before the run ends. They are tried again after pauses of
            10 s to 10 min, while training continues, and the last one at its end after 10 s to 1 min. None:
            forever, because a run that ends saves nothing.
        resident_root: a memory file system; None: `$CPR_RESIDENT_ROOT`, or `/dev/shm`.
        resume: whether a new run resumes from what is saved in the directory. If not, only saves of this
            launch are ever loaded, after failures.

    Raises:
        ValueError: an argument is missing or impossible; says what to change.
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
        mirror: MirrorConfig | None = None,
        policy: RecoveryPolicy | None = None,
        give_up_after_s: float | None = None,
        resident_root: str | None = None,
        resume: bool = True,
    ) -> None:
        self._phases = Phases()
        self._faults = FaultPlan.from_environment()
        self._config = CheckpointConfig(uri=checkpoint) if isinstance(checkpoint, str) else checkpoint
        self._policy, self._resume = policy or RecoveryPolicy(), resume
        if self._policy.auc_per_pls is None:
            scheme = None if priority is None else priority.scheme
            self._policy = replace(self._policy, auc_per_pls=AUC_PER_PLS.get(scheme, AUC_PER_PLS[None]))
        self._mirror_config = mirror or MirrorConfig()
        self._mirror: Mirror | None = None
        self._settings = SaveSettings(
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
        self._allocation: Allocation | None = None
        self._group: RankGroup | None = None
        self._timeout = timedelta()
        self._checkpointer: Checkpointer | None = None
        self._builder: SavesBuilder | None = None
        self._saves: Saves | None = None
        self._publisher: Publisher | None = None
        self._injector = Injector()
        self._restored_s: float | None = None
        self._is_closed = False
        self._has_asked_for_end = False
        self._memory.claim()
        self._phases.add("imports", (time.time_ns() - process_began_ns()) / 1e9)

    @property
    def steps_done(self) -> int:
        """Training steps done, including those of earlier generations and resumed runs."""
        return self._progress.steps_done

    @property
    def samples_done(self) -> int:
        """Samples trained in these steps, by all ranks."""
        return self._progress.samples_done

    @property
    def batches_to_skip(self) -> int:
        """Batches to skip after the registered states' position, because their training was interrupted."""
        return self._progress.to_skip

    @property
    def batches_done(self) -> int:
        """Batches trained or skipped: the position of the data if no loader is registered as a state."""
        return self._progress.batches_done + self._progress.to_skip

    @property
    def pls(self) -> float | None:
        """Portion of lost samples so far; None: unknown."""
        return self._progress.pls_total

    @property
    def history(self) -> RunHistory | None:
        """Costs of saves and failures so far, on rank 0 after `restore`; also written to the directory."""
        return self._saves.history if self._saves is not None else None

    @property
    def mirror(self) -> MirrorFigures | None:
        """What the mirror of this worker's rows has cost, and how old it is; None without one."""
        return self._mirror.figures if self._mirror is not None else None

    def take_save_costs(self) -> list[SaveCost | SaveEvent]:
        """Return bytes and times of the saves committed since the last call, and those begun and failed."""
        return self._saves.take_costs() if self._saves is not None else []

    @property
    def recoveries(self) -> list[Recovery]:
        """Reports of how each generation of workers started, oldest first; the last is of this generation."""
        return self._progress.recoveries

    @property
    def tables_adopted(self) -> bool:
        """After `building`: whether the tables hold live values, which must not be initialised again."""
        return self._allocation is not None and self._allocation.adopted

    @property
    def worker_group(self) -> WorkerGroup:
        """Ranks and session that the workers agreed on; after `init_process_group`."""
        if self._worker_group is None:
            raise ValueError("there is no process group yet: call init_process_group() of this object first")
        return self._worker_group

    @property
    def memory_folder(self) -> Path:
        """Folder of this worker's shared memory; after `init_process_group`."""
        assert self.worker_group
        assert self._memory.segment is not None
        return self._memory.segment.folder

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of this run; after `restore`."""
        if self._checkpointer is None:
            raise ValueError("there is no checkpointer yet: call restore() first")
        return self._checkpointer

    def init_process_group(
        self, backend: str | None = None, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        """Join the other workers and make the default process group, instead of `torch.distributed`.

        A node that holds memory gets its old ranks back if possible; `RANK` in the environment is set to the
        new rank. The ranks of a node are consecutive, in the order of `LOCAL_RANK`.

        Args:
            backend: "gloo", "nccl", or None: torch chooses.
            timeout: of the rendezvous and of collectives; also how long workers wait for one that does not
                come to a save.

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
        """Save in another directory than the one given first, which then only identifies the run.

        For runs whose directory is not known before the rendezvous. All ranks call it, between
        `init_process_group` and `building`, in every generation with the same directory.
        """
        assert self.worker_group
        self._config = replace(self._config, uri=uri)
        self._leave_if_finished()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Build the model in this block: its tables live in shared memory, the old one if that fits.

        Raises:
            ValueError: `CPR_FAULTS` asks for failures, and the directory is in an object store.
            NotEnoughMemoryError: there is too little shared memory; says what to change.
            ResidentMemoryError: shared memory cannot be used, or TorchRec lacks what is needed.
        """
        self._check_open()
        if self._faults.schedules and not is_local(self._config.uri):
            raise ValueError(
                f"{self._faults.source} needs a checkpoint directory on a file system, not "
                f"{self._config.uri}: what has happened is kept there"
            )
        worker_group, group, segment = self.worker_group, self._group, self._memory.segment
        assert group is not None
        assert segment is not None
        self._leave_if_finished()
        with self._phases.measured("build"):
            is_lost = must_start_over(open_storage(self._config.uri), group, worker_group)
            with allocate_tables(segment, adopt=self._memory.has_found and not is_lost) as allocation:
                yield
            self._allocation = allocation
        if self._memory.has_found and not allocation.adopted:
            logger.info("the tables get new memory: %s", allocation.reason)

    def restore(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        states: Mapping[str, Stateful] | None = None,
        per_rank_states: Mapping[str, Stateful | Heir] | None = None,
        before_save: Callable[[], object] | None = None,
        initialize: Callable[[Checkpointer], object] | None = None,
        changes: Changes = UNCHANGED,
    ) -> Recovery:
        """Restore the model, optimizers and states; called once, before the first step.

        Args:
            model: holds the sharded tables; built in `building`.
            optimizers: ordinary ones, of dense parameters and data-parallel tables. Fused parts of TorchRec's
                `CombinedOptimizer` are left out: their state lives with the rows of their tables.
            states: other states of training that are equal on all ranks, by name, with `state_dict` and
                `load_state_dict`. Leave out a loader that is read ahead of the steps, as TorchRec's pipelines
                do, because its position is not that of training: start it at `batches_done`.
            per_rank_states: states that differ by rank. A state comes back to the same rank if that rank's
                memory is of the restored step, and stays as it is otherwise. States with `inherit` (see
                `cpr.checkpoint.state.model_state.Heir`) take over those of ranks that no longer exist.
            before_save: called before each save; see `Checkpointer`.
            initialize: called on all ranks whenever training begins at its beginning: at first, and after
                failures before anything was saved. It may replace the values that the model was built with,
                for example by those of another run (`Checkpointer.warm_start`).
            changes: what the model may have that differs from the save it resumes from; the log lists what
                does. Give them again to restarted workers, until the changed model is saved.

        Returns:
            The report of this start.

        Raises:
            RunStoppedError: restarts cannot help, as after values that were not finite, or where a node has
                no room for mirrors; `cpr run` stops as well.
            NoProgressError: the run makes no progress; lists why.
            StartOverError: nothing is left; restarted workers start over.
            LockedError: another run uses the directory.
            MismatchError: a new launch would resume from a save that is older than what the last launch left
                in this machine's memory; says how to save or free that.
            CheckpointError: the directory cannot be written to, or what is needed from it cannot be read.
        """
        self._check_open()
        worker_group, group = self.worker_group, self._group
        if self._allocation is None:
            raise ValueError("build the model inside `with recovery.building():`, so that its tables survive")
        assert group is not None
        assert self._memory.segment is not None
        storage = open_storage(self._config.uri)
        self._injector = self._make_injector(storage)
        optimizers = ordinary(optimizers)
        checkpointer = self._make_checkpointer(
            self._injector.storage(storage), model, optimizers, before_save
        )
        for name, state in (states or {}).items():
            checkpointer.register(name, state)
        for name, owned in (per_rank_states or {}).items():
            checkpointer.register(name, owned, per_rank=True)
        if not has_memory(worker_group):  # also in later generations, as the first may have been refused
            refuse_unsaved(checkpointer, self._memory.home.folder.parent.parent)
        directory = take_directory(checkpointer, worker_group, resumes=self._resume)
        self._note_run()
        self._builder = builder = SavesBuilder(self._settings, checkpointer, self._progress, group)
        with self._phases.measured("restore"):
            builder.track(model, optimizers, self._memory.segment, self._allocation.adopted)
        start = Start(
            group=worker_group,
            resumes=self._resume or directory.is_own,
            adopted=self._allocation.adopted,
            total_samples=self._settings.total_samples,
            storage=storage,
        )
        restorer = Restorer(
            checkpointer,
            group,
            self._memory,
            self._progress,
            self._policy,
            self._phases,
            directory,
            start,
            initialize,
            changes,
        )
        restorer.restore()
        note_launches(checkpointer, worker_group, resumes=self._resume)
        self._publisher = Publisher(
            self._memory, checkpointer, self._progress, worker_group, model, optimizers
        )
        self._mirror = self._start_mirror(model, optimizers)
        recovery = self._progress.note_seconds(self._phases.seconds)
        with self._phases.measured("restore"):
            self._saves = builder.build(restorer, storage)
        if worker_group.rank == 0:
            for story in self._progress.newest_stories:
                logger.info("%s", story)
        self._restored_s = time.perf_counter()
        return recovery

    def step(self, samples: int) -> None:
        """Complete a training step on this rank, after its tables, dense parameters and states were updated.

        Args:
            samples: trained in the step, by all ranks together.

        Raises:
            SaveFailedError: saves have failed for `give_up_after_s`, or another run owns the directory.
            InjectedError: `CPR_FAULTS` asks for it.
        """
        self._check_open()
        if self._saves is None or self._publisher is None:
            raise ValueError("there is nothing to continue from yet: call restore() first")
        self._progress.step(samples)
        self._note_first_step()
        # The save is counted in the progress before that is published, and begins only after: if this worker
        # dies in between, its successor knows of a save that failed, but never misses one that was made.
        try:
            self._saves.step()
        except SaveFailedError:  # on all ranks alike
            self._publisher.publish()  # the step is whole: its batch must not count as interrupted
            raise
        self._publisher.publish(at_once=self._mirror is not None)  # mirrors are of the same step
        if self._mirror is not None:
            epoch = self.checkpointer.ownership.epoch
            self._mirror.step(self.steps_done, epoch, self._publisher.mirrored_state())
        self._saves.save_if_due()
        self._publisher.note_epoch()
        self._publisher.note_saves(self._saves.are_failing)
        self._injector.step(self.steps_done, self.worker_group.rank)

    def note_skipped(self) -> None:
        """Record, on all ranks, that one of `batches_to_skip` was taken from the data and left out.

        Needed only for a `save_now` before the next `step`: that step, or `close`, counts all of them.

        Raises:
            ValueError: no batch was to be skipped.
        """
        self._progress.note_skipped()

    def save_now(self, timeout_s: float | None = None) -> bool:
        """Save this moment and wait until the save is durable; on all ranks, for example when training stops.

        The memory stays, because workers may be started again, and is freed once their launcher has ended.

        Args:
            timeout_s: give up if the save takes longer, which is no failure; the shortest of all ranks
                counts. None: wait without a limit.

        Returns:
            Whether this moment is saved; the same on all ranks.

        Raises:
            SaveFailedError: the save failed; names the file.
        """
        self._check_open()
        if self._saves is None or self._publisher is None:
            raise ValueError("there is nothing to save yet: call restore() first")
        try:
            is_saved = self._saves.now(timeout_s)
        except SaveFailedError:
            self._keep_memory()
            raise
        self._publisher.note_saves(self._saves.are_failing)
        self._publisher.publish()  # restarted workers must know of the save
        return is_saved

    def close(self) -> None:
        """End training: save a last time, unless that was done, and free the shared memory.

        While the directory cannot be written to, the save is tried again, after growing pauses.

        Raises:
            SaveFailedError: saves have failed for `give_up_after_s`, or another run owns the directory; the
                memory is kept.
        """
        if self._is_closed:
            return
        if self._saves is not None and self._group is not None:
            while self._progress.to_skip:  # at the end of the data no step follows that would count them
                self._progress.note_skipped()
            self._saves.finish(self._keep_memory)
            self._group.gather(None)  # all ranks have saved: no memory is needed any more
        self._release(free_mirrors=True)
        self._memory.remove()

    def __enter__(self) -> Self:
        """Return this object; the end of the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, keep the memory and record the reason.

        `sys.exit(0)` is no error. If it comes before `restore`, memory that was found is kept all the same.
        """
        if self._is_closed:
            return
        if isinstance(error, RunFinished):
            if self._checkpointer is not None:
                self._checkpointer.close(abandon=True)
            self._release(free_mirrors=True)
            self._memory.remove()
            return
        has_ended = kind is None or self._saves is not None or not self._memory.claimed
        if error is not None and (is_failure(error) or not has_ended):
            self._abort(error)
            return
        try:
            self.close()
        except BaseException as failure:
            self._abort(failure)
            raise

    def _abort(self, reason: BaseException) -> None:
        """Leave the memory to a successor, with the reason of this worker's end."""
        diverged = isinstance(reason, FloatingPointError)
        for_good = diverged or isinstance(reason, RunStoppedError)
        if self._memory.segment is not None:
            self._memory.segment.status.leave(_text_of(reason), for_good)
        if isinstance(reason, RunStoppedError):  # on all ranks alike, so that all nodes stop
            note_stopped()
        if self._publisher is not None and not diverged:
            self._publisher.copy_out()
            self._publisher.note_saves(isinstance(reason, SaveFailedError))
            if self._publisher.is_unsaved and self.worker_group.rank == 0:
                self._log_how_to_rescue()
        try:
            if self._checkpointer is not None:
                self._checkpointer.close(abandon=True)
            self._release()
        except Exception as error:  # of a broken group; users must see the reason, and not this
            logger.warning("not everything could be closed: %s", _text_of(error))

    def _keep_memory(self) -> None:
        """Have the memory kept, even if this worker is killed now, as what it holds could not be saved."""
        assert self._publisher is not None
        self._publisher.note_saves(are_failing=True)

    def _log_how_to_rescue(self) -> None:
        folder = self._memory.home.folder
        logger.error(
            "what was trained up to step %d is not saved. It stays in memory, in %s on each node, even "
            "if this run is not restarted, until a launch saves a later step or finishes the run. What to do "
            "then: `cpr rescue %s --out %s` saves it there, or into an empty directory; `cpr clean --yes "
            "--unsaved` frees it",
            self._progress.steps_done,
            folder,
            folder.name,
            self.checkpointer.uri if self._checkpointer is not None else "DIR",
        )

    def _release(self, *, free_mirrors: bool = False) -> None:
        self._is_closed = True
        if self._mirror is not None:
            self._mirror.close(remove=free_mirrors)
        if self._publisher is not None:
            self._publisher.close()
        if self._builder is not None:
            self._builder.close()
        if self._group is not None and dist.is_initialized():
            self._group.close()

    def _make_checkpointer(
        self,
        storage: Storage,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        before_save: Callable[[], object] | None,
    ) -> Checkpointer:
        """Make a checkpointer of the model, its optimizers and the progress of the run."""
        claimant = Claimant(session=self.worker_group.session_id, generation=self.worker_group.generation)
        self._checkpointer = checkpointer = Checkpointer(
            model,
            self._config,
            optimizers,
            claimant=claimant,
            storage=storage,
            timeout=self._timeout,
            before_save=before_save,
        )
        checkpointer.register(PROGRESS_STATE, self._progress)
        for number, optimizer in enumerate(optimizers):
            state = OptimizerState(optimizer, checkpointer.shards)
            checkpointer.register(f"optimizer{number}", state, optional=state.has_only_tables)
        return checkpointer

    def _start_mirror(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Mirror | None:
        """Start the mirrors; a run that has begun with them goes on without if they cannot be made again."""
        assert self._group is not None
        assert self._publisher is not None
        group, memory = self.worker_group, self._memory
        try:
            return start_mirror(
                self._mirror_config,
                group,
                self._group,
                memory.home,
                self.checkpointer.shards,
                model,
                optimizers,
                self._publisher.outside,
                memory.segment,
                self.steps_done,
            )
        except (NotEnoughMemoryError, OSError) as error:  # on all ranks alike
            if group.continues:
                if group.rank == 0:
                    logger.warning("training continues without mirrors: %s", error)
                return None
            if isinstance(error, NotEnoughMemoryError):  # and no restart brings more
                raise RunStoppedError(f"{error}\nRestarts cannot help: stop the launcher") from error
            raise

    def _make_injector(self, storage: Storage) -> Injector:
        """Make the injector of the failures that `CPR_FAULTS` asks for, if any."""
        folder = Path(storage.uri) if isinstance(storage, LocalStorage) else None
        return Injector(
            self._faults,
            folder=folder,
            num_ranks=self.worker_group.world_size,
            memory=self.memory_folder,
            checkpoint=folder,
        )

    def _leave_if_finished(self) -> None:
        """End with exit code 0 if the run has finished without these workers; asked once.

        Raises:
            RunFinished: it has; the memory is freed when this leaves the `with` block.
        """
        if self._has_asked_for_end:
            return
        self._has_asked_for_end = True
        assert self._group is not None
        raise_if_finished(open_storage(self._config.uri), self._group, self.worker_group)

    def _note_run(self) -> None:
        """Tell the janitor, and the `cpr run` above this worker, which run the memory belongs to."""
        memory, launcher = self._memory.home.folder, os.environ.get(FOLDER_VARIABLE)
        folders = [memory, *([Path(launcher)] if launcher else [])]
        note_run(self._config.uri, self.worker_group.session_id, memory, *folders)

    def _note_first_step(self) -> None:
        if self._restored_s is None:
            return
        self._phases.add("first_step", time.perf_counter() - self._restored_s)
        self._restored_s = None
        recovery = self._progress.note_seconds(self._phases.seconds)
        if self.worker_group.rank == 0:
            logger.info("training continues: the first step took %.2f s", recovery.seconds["first_step"])

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this object is closed; make another one")


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check(uri: str, policy: RecoveryPolicy, total_samples: int | None) -> None:
    if not uri:
        raise ValueError("no checkpoint directory was given: name one in PartialRecovery(checkpoint=...)")
    if policy.max_pls is not None and total_samples is None:
        raise ValueError("max_pls is a portion of all samples of the run: give total_samples as well")
