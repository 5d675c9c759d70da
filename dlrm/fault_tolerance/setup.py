"""Partial recovery for the trainer: when it is on, how a restarted run finds its folder, and its session."""

import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final, Self

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.checkpoint.catalog.committer import Retention
from cpr.checkpoint.checkpointer import CheckpointConfig as SaveConfig
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.ownership.records import Claimant
from cpr.checkpoint.state.changes import Changes
from cpr.checkpoint.state.model_state import Heir, Stateful
from cpr.estimator.history import RunHistory, SaveCost, SaveEvent
from cpr.estimator.planning.interval import IntervalRule
from cpr.faults.injector import ENVIRONMENT as FAULTS_VARIABLE
from cpr.mirror.config import MirrorFigures
from cpr.priority.config import PriorityConfig
from cpr.recovery.decide.assessment import RecoveryPolicy
from cpr.recovery.run.report import Recovery
from cpr.resident.home import LAUNCH_VARIABLE
from cpr.session import PartialRecovery
from dlrm.config.dataset import open_manifest, steps_in_epoch, total_samples
from dlrm.config.schema import CheckpointConfig, Config
from dlrm.fault_tolerance.session import Session, left_to_finish, warn_unsaved
from dlrm.launch.files import replace_text
from dlrm.optim.build import Optimizers
from dlrm.telemetry.report import FailureHistory, SavesReport

LAUNCHES: Final = "launches"
"""File in a run folder with the run's launch and session ids, one a line; a restarted run finds its folder by
them."""

AFTER_FAILURE: Final = {"process", "mirror", "partial", "full"}
"""Kinds of recovery that follow a failure (`cpr.recovery.run.report`); a start or resume is none."""

logger = logging.getLogger(__name__)


def open_recovery(config: Config, resume: Path | None) -> "RecoverySetup | None":
    """Set up partial recovery if the run saves and a launcher restarts its workers; else None.

    Raises:
        ValueError: an option needs partial recovery, which is off; says what to change.
    """
    if config.recovery.enabled and config.checkpoint.saves and _restarts_workers():
        return RecoverySetup(config, resume)
    if config.checkpoint.needs_recovery:
        raise ValueError(
            "checkpoint.priority and checkpoint.target_pls are for runs with partial recovery: give torchrun "
            "--max-restarts and leave recovery.enabled as it is, or set checkpoint.every_steps alone"
        )
    if config.mirror.to != "none":
        raise ValueError(
            "mirror.to is for runs with partial recovery: give torchrun --max-restarts, set "
            "checkpoint.every_steps, and leave recovery.enabled as it is"
        )
    if faults := os.environ.get(FAULTS_VARIABLE):
        raise ValueError(
            f"{FAULTS_VARIABLE}={faults} asks for failures, which only runs with partial recovery inject: "
            "give torchrun --max-restarts, set checkpoint.every_steps and leave recovery.enabled as it is, "
            f"or unset {FAULTS_VARIABLE}"
        )
    return None


def save_config(config: CheckpointConfig, folder: Path) -> SaveConfig:
    """Checkpoint location and limits of a run with this folder."""
    return SaveConfig(
        uri=config.directory(folder),
        host_memory_bytes=config.host_memory_mb * 10**6,
        retention=Retention(keep_last=config.keep_last),
    )


class RecoverySession(Session):
    """`cpr.PartialRecovery`, after it joined its workers, behind the methods that the training loop calls."""

    def __init__(self, recovery: PartialRecovery, config: Config, restore: Callable[[], Recovery]) -> None:
        self._recovery = recovery
        self._config = config
        self._restore = restore

    @property
    def batches_to_skip(self) -> int:
        """Number of next batches to drop, because a worker died while it trained on them."""
        return self._recovery.batches_to_skip

    def note_skipped(self) -> None:
        """Count one dropped batch."""
        self._recovery.note_skipped()

    @property
    def failures(self) -> FailureHistory:
        """Recoveries, portion of lost samples and cost of saves."""
        return FailureHistory(
            recoveries=tuple(recovery.to_dict() for recovery in self.recoveries),
            pls=self._recovery.pls,
            saves=_saves(self.history),
            mirror=self.mirror,
        )

    @property
    def history(self) -> RunHistory | None:
        """Costs of saves and failures so far, on rank 0."""
        return self._recovery.history

    @property
    def recoveries(self) -> list[Recovery]:
        """Recoveries after failures, oldest first."""
        return [recovery for recovery in self._recovery.recoveries if recovery.kind in AFTER_FAILURE]

    @property
    def mirror(self) -> MirrorFigures | None:
        """What the mirror of this rank's rows has cost, and its age; None without mirrors."""
        return self._recovery.mirror

    def take_save_costs(self) -> list[SaveCost | SaveEvent]:
        """Costs of the saves committed since the last call, and those begun and failed."""
        return self._recovery.take_save_costs()

    def restore(self) -> None:
        """Restore model and data position.

        Raises:
            CheckpointError: rows that only the checkpoint holds cannot be read.
        """
        self._restore()

    def step(self, samples: int) -> None:
        """Publish the step, so that it survives the death of this process.

        Raises:
            SaveFailedError: saves have failed for `checkpoint.give_up_after`, or another run owns the
                directory.
        """
        self._recovery.step(samples)

    @property
    def leaving_takes(self) -> timedelta:
        """`checkpoint.stop_within_s`."""
        return timedelta(seconds=self._config.checkpoint.stop_within_s)

    def leave(self, spent: timedelta) -> bool:
        """Save if the remaining time allows it, and keep the resident memory.

        The memory is freed only after torchrun itself has ended, because torchrun also stops workers to start
        others when nodes join or leave.
        """
        remaining_s = (self.leaving_takes - spent).total_seconds()
        step = self._recovery.steps_done
        if self._recovery.save_now(remaining_s):  # a collective: ranks got the signal at different times
            logger.info("saved at step %d before leaving", step)
            return True
        warn_unsaved(step, self._recovery.checkpointer.newest_step)
        return False

    def save_end(self) -> None:
        """Save the trained state and wait for the commit; the resident memory stays until `finish`."""
        with left_to_finish():
            self._recovery.save_now()

    def finish(self) -> None:
        """Save the trained state and free the resident memory."""
        self._recovery.close()


def _saves(history: RunHistory | None) -> SavesReport | None:
    """What saving cost; None on ranks without a history, and before the first save."""
    if history is None or not history.saves:
        return None
    of_rows = [save.blocked_s for save in history.saves if save.kind == "rows"]
    return SavesReport(
        num_bases=len(history.saves) - len(of_rows),
        num_row_saves=len(of_rows),
        blocked_s=median(of_rows or [save.blocked_s for save in history.saves]),
    )


class RecoverySetup:
    """Runs the trainer with `cpr.PartialRecovery`, so that tables survive an error of the worker."""

    def __init__(self, config: Config, resume: Path | None) -> None:
        self._config = config
        root = Path(config.train.run_folder).absolute()  # the run's own folder is known after the rendezvous
        self._partial = PartialRecovery(
            save_config(config.checkpoint, resume or root),
            save_every_steps=_interval(config.checkpoint),
            priority=_priority(config.checkpoint),
            moment=config.checkpoint.moment,
            total_samples=total_samples(config, steps_in_epoch(config, open_manifest(config.data))),
            mirror=config.mirror,
            policy=RecoveryPolicy(
                max_lost_share=config.recovery.max_lost_share,
                max_pls=config.recovery.max_pls if config.recovery.max_pls < 1 else None,
            ),
            give_up_after_s=config.checkpoint.give_up_after_s,
            resume=resume is not None,
        )

    def __enter__(self) -> Self:
        self._partial.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the resident memory at the end of a run; keep it after an error."""
        self._partial.__exit__(kind, error, trace)

    def join(self, device: torch.device) -> None:
        """Join the other ranks; afterwards RANK in the environment is this worker's.

        Raises:
            RendezvousError: not all workers joined in time.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._partial.init_process_group(backend, timedelta(seconds=self._config.recovery.timeout_s))

    @property
    def claimant(self) -> Claimant:
        """These workers, as owners of directories besides that of the checkpoints; after `join`."""
        group = self._partial.worker_group
        return Claimant(session=group.session_id, generation=group.generation)

    @property
    def continues(self) -> bool:
        """Whether the workers were restarted in a run that had begun before; known once they have joined."""
        return self._partial.worker_group.continues

    def find_folder(self, root: Path) -> Path | None:
        """Find the folder of a run that began before its workers were restarted; on rank 0."""
        if not self.continues:
            return None
        found = [
            path.parent
            for path in root.glob(f"*/{LAUNCHES}")
            if self._ids & set(path.read_text().splitlines())
        ]
        return max(found, key=lambda folder: folder.stat().st_ctime_ns, default=None)

    def save_in(self, folder: Path) -> None:
        """Set the run's folder, known on all ranks, and record this launch in it."""
        self._partial.save_to(save_config(self._config.checkpoint, folder).uri)
        path = folder / LAUNCHES
        if self._partial.worker_group.rank == 0:
            known = set(path.read_text().splitlines()) if path.exists() else set()
            if self._ids <= known:
                return
            try:
                replace_text(path, "".join(f"{name}\n" for name in sorted(known | self._ids)))
            except OSError as error:  # a full disk ends no run, and the folder is found by any of the ids
                if not self._ids & known:
                    raise
                logger.warning("goes on without recording this launch in %s: %s", path, error)

    def build(self, shard: Callable[[], DistributedModelParallel]) -> DistributedModelParallel:
        """Build the model with its tables in resident memory, that of a dead worker if there is any."""
        with self._partial.building():
            return shard()

    @property
    def tables_adopted(self) -> bool:
        """Whether the tables of the model hold what a dead worker left."""
        return self._partial.tables_adopted

    def session(
        self,
        model: DistributedModelParallel,
        optimizers: Optimizers,
        states: Mapping[str, Stateful],
        own_states: Mapping[str, Stateful | Heir],
        before_save: Callable[[], object],
        initialize: Callable[[Checkpointer], object],
        changes: Changes,
    ) -> RecoverySession:
        """Create the session for the training loop."""
        return RecoverySession(
            self._partial,
            self._config,
            restore=lambda: self._partial.restore(
                model, optimizers.table_optimizers, states, own_states, before_save, initialize, changes
            ),
        )

    @property
    def _ids(self) -> set[str]:
        """Ids of this session and its launches; the launches still hold when all resident memory was lost.

        Names that a user chooses, such as `--rdzv-id`, are left out, because other runs may have them too.
        """
        return {self._partial.worker_group.session_id, *self._partial.worker_group.launches}


def _interval(config: CheckpointConfig) -> int | IntervalRule:
    """Steps between saves, or the rule that chooses them."""
    if config.target_pls == 0:
        return config.every_steps
    time_to_failure_s = config.mean_hours_to_failure * 3600
    return IntervalRule(target_pls=config.target_pls, mean_time_to_failure_s=time_to_failure_s)


def _priority(config: CheckpointConfig) -> PriorityConfig | None:
    """Row-save scheme, or None to save all rows."""
    if config.priority == "none":
        return None
    return PriorityConfig(scheme=config.priority, ratio=config.ratio)


def _restarts_workers() -> bool:
    """Whether torchrun (`--max-restarts`) or `cpr run` restarts dead workers."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in {"", "0"} or LAUNCH_VARIABLE in os.environ
