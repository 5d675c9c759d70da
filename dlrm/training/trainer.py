"""The training loop: fetch a batch, forward, backward, synchronize, update, record."""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpr.humanize import count_text
from data.batch import Batch
from data.loader import DataLoader
from data.stream.loader import StreamLoader
from dlrm.batching.dynamic import DynamicBatching
from dlrm.comm.late import LateScalars
from dlrm.config.schema import TrainConfig
from dlrm.dense_sync import DenseSync
from dlrm.fault_tolerance.session import Session
from dlrm.launch.stop_signal import StopSignal
from dlrm.metrics import ClickMetrics, MetricValues
from dlrm.optim.build import Optimizers
from dlrm.optim.norms import local_norms
from dlrm.pipeline.schedules import Schedule
from dlrm.sharding.parameters import dense_parameters
from dlrm.telemetry.recorder import Recorder
from dlrm.telemetry.scaling import ScalingMeter
from dlrm.training.best import Selection

logger = logging.getLogger(__name__)

NUM_SCALARS = 4
"""Scalars reduced with the gradients: loss, finite check, stop flag, stop-at-once flag; those of
`DynamicBatching` and of `ScalingMeter` follow them."""


ADVICE = (
    "Lower dense.learning_rate and tables.learning_rate, or lengthen schedule.warmup_steps, and start over, "
    "or --resume from what was saved"
)


class DivergedError(FloatingPointError):
    """The loss, a gradient or a parameter is NaN or infinite; the message names step, batch and ranks."""


class _Checked(NamedTuple):
    """What this rank has shared in a step to find NaN."""

    step: int
    loss: Tensor
    finite_check: Tensor


@dataclass(kw_only=True)
class Trainer:
    """Trains a model until its steps are done, a signal stops it, or the loss is NaN or infinite.

    `dlrm.training.build` makes all its parts.
    """

    config: TrainConfig
    model: nn.Module
    """A model as `dlrm.models.contract` describes; updates its tables in the backward pass."""
    schedule: Schedule
    """Runs the model's forward and backward passes."""
    optimizers: Optimizers
    replicas: DenseSync
    loader: DataLoader | StreamLoader
    evaluate: Callable[[Callable[[], None]], MetricValues]
    """Computes metrics on the test days; calls its argument before each batch, on all ranks alike."""
    telemetry: Recorder
    session: Session
    stop: StopSignal
    device: torch.device
    selection: Selection = field(default_factory=Selection)
    batching: DynamicBatching | None = None
    """None: sizes of batches do not follow the speed of ranks."""
    scaling: ScalingMeter | None = None
    """None: it is not measured."""
    steps_done: int = 0
    samples_done: int = 0

    def __post_init__(self) -> None:
        self._progressive = ClickMetrics(self.device)
        self._has_predictions = False
        """Whether any step, on whatever rank, belongs to the window of progressive validation."""
        self._mean_loss = torch.zeros((), device=self.device)
        """Mean over ranks of the weighted losses of a step."""

    def train(self) -> None:
        """Run to the end.

        Raises:
            DivergedError: the loss, a dense gradient or a dense parameter is NaN or infinite. Table rows may
                be too by then, so the tables must not be used further.
            StopRequested: a signal stopped the run; the last step is complete on all ranks, and saved if the
                session saves and there was time.
        """
        self.session.restore()
        self.selection.begin(is_new=self.steps_done == 0)
        self._check_steps_left()
        self.telemetry.begin()
        if lost := self.replicas.settle():
            logger.warning("lost %s", lost)
        with self.stop.deferred(), self.batching or nullcontext():
            self._run()
        self.telemetry.exchange(self.replicas.take_figures())  # of the steps after the last logged one
        with self.stop.extended(self.session.leaving_takes):  # SIGTERM lets the final save complete
            self.session.finish()
        self._record_costs()

    def _check_steps_left(self) -> None:
        """Log that a resumed run has nothing left to train, or refuse to end it before where it is.

        Raises:
            ValueError: the run has done more than `train.max_steps`.
        """
        if 0 < self.config.max_steps < self.steps_done:
            raise ValueError(
                f"train.max_steps is {self.config.max_steps}, but the run has done "
                f"{count_text(self.steps_done, 'step')}: give at least that many (0: all epochs)"
            )
        if not self.should_continue():
            why = self.selection.why_over
            logger.info(
                "the run %s, and is only evaluated; to train on, raise %s",
                f"stopped early at step {self.steps_done} ({why})"
                if why
                else f"has done all its {count_text(self.steps_done, 'step')}",
                "train.patience" if why else "train.max_steps or train.epochs",
            )

    def state_dict(self) -> dict[str, Any]:
        """Steps and samples done, and the state that all ranks share for dense synchronization."""
        return {
            "steps_done": self.steps_done,
            "samples_done": self.samples_done,
            "replicas": self.replicas.state_dict(),
            "selection": self.selection.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position."""
        self.steps_done, self.samples_done = state["steps_done"], state["samples_done"]
        self.replicas.load_state_dict(state.get("replicas", {}), self.steps_done)  # older runs have none
        self.selection.load_state_dict(state.get("selection", {}))

    def should_continue(self) -> bool:
        """Whether epochs and steps are left, and training has not stopped early."""
        if self.selection.why_over:
            return False
        if self.config.max_steps and self.steps_done >= self.config.max_steps:
            return False
        return self.loader.epoch < self.config.epochs

    def check_parameters(self) -> None:
        """Raise if a dense parameter is NaN or infinite; called when all ranks have equal parameters.

        The loss does not show it: a fused ReLU turns NaN into 0, and all samples get the same finite logit.
        Nor do gradients show what the last update did.

        Raises:
            DivergedError: names the parameter.
        """
        sums = torch.stack([parameter.detach().sum() for parameter in self._dense.values()])
        if sums.isfinite().all():
            return
        bad = [name for name, total in zip(self._dense, sums.tolist(), strict=True) if not isfinite(total)]
        raise DivergedError(
            f"parameter {bad[0]} has NaN or infinite values after step {self.steps_done}, perhaps "
            f"because a table has. {ADVICE}"
        )

    @cached_property
    def _scalars(self) -> LateScalars[_Checked]:
        return LateScalars(on_gpu=self.device.type == "cuda")

    @cached_property
    def _evaluation_flags(self) -> LateScalars[None]:
        return LateScalars(on_gpu=self.device.type == "cuda")

    @cached_property
    def _dense(self) -> dict[str, nn.Parameter]:
        """The dense parameters by name."""
        dense = {id(parameter) for parameter in dense_parameters(self.model)}
        return {name: each for name, each in self.model.named_parameters() if id(each) in dense}

    def _run(self) -> None:
        evaluated_at = -1
        # a run may be cut off after a save and before the evaluation of the same step
        if self.steps_done and self._should_evaluate():
            self._evaluate()
            evaluated_at = self.steps_done
        self._begin_measuring()
        stream = self.loader if isinstance(self.loader, StreamLoader) else None
        if stream is not None:
            stream.while_waiting = self._leave_if_any_rank_was_signalled
        while self.should_continue():
            for batch in self.loader:
                # the batch of a stream that was being trained when a worker died is not known: the next one
                # has other records, too
                if self.session.batches_to_skip and stream is None:
                    self.session.note_skipped()
                else:
                    self._train_on(batch)
                    if self._is_logged(self.steps_done):
                        self._record_stream()
                if evaluated_at != self.steps_done and self._should_evaluate():
                    self._evaluate()
                    evaluated_at = self.steps_done
                self._begin_measuring()
                if not self.should_continue():
                    break
        self._record_stream()
        self._end_window()
        self.telemetry.log_rest()
        self._save_end()
        if evaluated_at != self.steps_done:
            self._evaluate()

    def _record_stream(self) -> None:
        if isinstance(self.loader, StreamLoader) and (figures := self.loader.figures) is not None:
            self.telemetry.streamed(self.steps_done, figures)

    def _should_evaluate(self) -> bool:
        """Whether an evaluation is due; at the end of training no, because the end is saved first."""
        every = self.config.evaluate_every_steps
        is_due = every > 0 and self.steps_done % every == 0
        return (is_due or self._is_after_epochs(self.config.evaluate_every_epochs)) and not self._is_at_end()

    def _is_after_epochs(self, every: int) -> bool:
        """Whether an epoch has just ended, and this many, or a multiple of it, are done; 0: never."""
        if every == 0 or (left := self.loader.steps_left) not in {0, len(self.loader)}:
            return False
        return (self.loader.epoch + (left == 0)) % every == 0

    def _is_at_end(self) -> bool:
        is_last_epoch = self.loader.epoch + 1 == self.config.epochs
        return not self.should_continue() or (is_last_epoch and self.loader.steps_left == 0)

    def _save_end(self) -> None:
        """Save the trained state before the last evaluation, which may fail on damaged data."""
        self._stop_unless_finite(self._scalars.take(), self.steps_done)
        self.replicas.join()
        with self.stop.extended(self.session.leaving_takes):  # SIGTERM lets the save complete
            self.session.save_end()

    def _evaluate(self) -> None:
        self._leave_if_any_rank_was_signalled()
        self._stop_unless_finite(self._scalars.take(), self.steps_done)
        self.replicas.join()
        self.check_parameters()
        values = self.evaluate(self._before_evaluated_batch)
        is_last = not self.should_continue()
        self.selection.judge(self.steps_done, values, self._leave_if_any_rank_was_signalled, is_last=is_last)
        self.telemetry.evaluation(step=self.steps_done, samples=self.samples_done, values=values)

    def _record_costs(self) -> None:
        self.telemetry.costs(self.session.take_save_costs(), self.session.recoveries)

    def _train_on(self, batch: Batch) -> None:
        started_s = time.perf_counter()
        self.telemetry.lap("data")
        self.optimizers.begin_step(self.steps_done)
        with nullcontext() if self.scaling is None else self.scaling.counting():
            loss, logits = self.schedule.step(batch, self._upcoming)
        self.telemetry.lap("forward_backward")
        stop, at_once, *seconds = self._exchange(loss, batch)
        self.telemetry.lap("dense_exchange")
        self.optimizers.step()
        self.replicas.updated(time.perf_counter() - started_s)
        self.telemetry.lap("optimizer")
        self.steps_done += 1
        self._adapt_batches(seconds)
        num_samples = self.loader.step_samples
        self.samples_done += num_samples
        self._record_step(batch, logits)
        self.telemetry.lap("recording")
        # it may wait for the save before, after which SIGTERM is to be answered with a save, too
        with self.stop.extended(self.session.leaving_takes):
            self.session.step(num_samples)
        if self._is_logged(self.steps_done):
            self._record_costs()
        self.telemetry.lap("saving")
        if stop:
            self._leave(at_once=bool(at_once))

    def _exchange(self, loss: Tensor, batch: Batch) -> list[float]:
        """Average dense gradients over ranks, and with them what ranks tell one another in a step.

        Returns what `_stop_unless_finite` does.
        """
        # ranks share these scalars in the collective that averages the gradients: no extra latency
        finite_check = self._finite_check().to(loss.device)
        shared = [*self._stop_flags, *(self.batching.scalars if self.batching is not None else ())]
        others = [loss.new_full((), each) for each in shared]
        scalars = torch.stack([loss.detach(), finite_check, *others])
        if self.scaling is None:
            means = self.replicas.average(scalars)
        else:
            scalars = torch.cat([scalars, self.scaling.scalars(batch.weight)])
            means = self.scaling.observe(self.replicas.average(scalars))
        self._mean_loss = means[0]
        checked = _Checked(self.steps_done + 1, loss.detach(), finite_check)
        return self._stop_unless_finite(self._scalars.give(means, checked), self.steps_done + 1)

    def _adapt_batches(self, seconds: Sequence[float]) -> None:
        """Change sizes of batches by what `DynamicBatching` shared, of all ranks."""
        if self.batching is None:
            return
        self.batching.end()
        if sizes := self.batching.adapt(seconds, self.steps_done):
            self.telemetry.resized(self.steps_done, sizes, self.batching.seconds)

    def _record_step(self, batch: Batch, logits: Tensor | None) -> None:
        """Record the step that was just done."""
        if self._is_logged(self.steps_done):
            self.telemetry.exchange(self.replicas.take_figures())
            self.telemetry.mirror(self.session.mirror)
        self._validate(batch, logits)
        full_step = self.loader.config.batch_size * dist.get_world_size()
        real = slice(batch.num_valid)
        self.telemetry.step(
            step=self.steps_done,
            samples=self.samples_done,
            loss=self._mean_loss * (full_step / self.loader.step_samples),
            logits=None if logits is None else logits[real],
            labels=batch.labels[real],
            learning_rates=self.optimizers.learning_rates,
        )
        if self.scaling is not None and self._is_logged(self.steps_done):
            self.telemetry.scaling(self.scaling.figures())

    def _validate(self, batch: Batch, logits: Tensor | None) -> None:
        """Count the predictions of a batch, which is trained now, for progressive validation."""
        every = self.config.progressive_steps
        if not every:
            return
        real = slice(batch.num_valid)
        if logits is not None and batch.num_valid:
            self._progressive.update(logits.detach()[real], batch.labels[real])
        self._has_predictions = True
        if self.steps_done % every == 0:
            self._end_window()

    def _end_window(self) -> None:
        """Record the metrics of a window of progressive validation, if any step was trained in it."""
        if self._has_predictions:
            self.telemetry.progressive(self.steps_done, self.samples_done, self._progressive.compute())
            self._progressive, self._has_predictions = ClickMetrics(self.device), False

    def _upcoming(self, count: int) -> Sequence[Batch]:
        """The next batches that will be trained, at most `count`."""
        if self.config.max_steps:
            count = min(count, self.config.max_steps - self.steps_done - 1)
        self.telemetry.lap("forward_backward")
        batches = self.loader.upcoming(count)
        self.telemetry.lap("data")
        return batches

    def _begin_measuring(self) -> None:
        if self.batching is not None:
            self.batching.begin()

    def _stop_unless_finite(self, found: tuple[list[float], "_Checked"] | None, begun: int) -> list[float]:
        """Check the scalars of a step, of which `begun` is the newest.

        Returns whether to stop, whether at once, and what `DynamicBatching` shares.

        On a GPU the scalars are those of the step before: NaN and signals end the run a step later.
        """
        if found is None:
            return [0.0, 0.0]
        (mean_loss, mean_finite_check, *others), checked = found
        if not isfinite(mean_loss + mean_finite_check):
            self._raise_diverged(checked, begun)
        return others

    @property
    def _stop_flags(self) -> list[float]:
        """Whether this rank got a signal, and whether it was Ctrl-C, which stops without saving."""
        return [float(self.stop.requested), float(self.stop.signum == signal.SIGINT)]

    def _leave_if_any_rank_was_signalled(self) -> None:
        """Stop all ranks together outside of steps, where one that left alone would hang the others."""
        self._leave_if(self._shared_flags().tolist())

    def _before_evaluated_batch(self) -> None:
        """Stop as above, on a GPU by what ranks were asked before the batch before."""
        found = self._evaluation_flags.give(self._shared_flags(), None)
        if found is not None:
            self._leave_if(found[0])
        self.telemetry.evaluating()

    def _shared_flags(self) -> Tensor:
        """The larger of all ranks' stop flags, `[2]`."""
        flags = torch.tensor(self._stop_flags).to(self.device, non_blocking=True)
        if dist.get_world_size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags

    def _leave_if(self, flags: Sequence[float]) -> None:
        stop, at_once = flags
        if stop:
            self._leave(at_once=bool(at_once))

    def _leave(self, at_once: bool) -> None:
        if not at_once:
            self.replicas.join()
            with self.stop.extended(self.session.leaving_takes):
                is_saved = self.session.leave(timedelta(seconds=self.stop.seconds_since))
                if is_saved and self.batching is not None:
                    self.batching.leave()
        self.stop.leave()

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_every_steps == 0

    def _finite_check(self) -> Tensor:
        """A scalar that is finite if all dense gradients are, and in logged steps all dense parameters too.

        It needs no synchronization; ranks share it with the loss. Gradients show NaN rows at once, whatever a
        ReLU makes of them. Where gradients are sent before this point (`comm.exchange=priority`), parameters
        show it a step later.
        """
        tensors = [each.grad for each in self._dense.values() if each.grad is not None]
        if not tensors or self._is_logged(self.steps_done + 1):
            tensors += self._dense.values()
        return local_norms([each.detach() for each in tensors]).sum()

    def _raise_diverged(self, checked: "_Checked", begun: int) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (checked.loss.item(), checked.finite_check.item()))
        ranks = [rank for rank, (value, _) in enumerate(found) if not isfinite(value)]
        if ranks:
            what = f"the loss is {found[ranks[0]][0]}"
        else:
            self.check_parameters()
            ranks = [rank for rank, (_, value) in enumerate(found) if not isfinite(value)]
            what = "gradients outside the tables are NaN or infinite"
        where = self.loader.where(begun - checked.step)
        raise DivergedError(
            f"{what} at step {checked.step} ({where}, rank {', '.join(map(str, ranks))}). {ADVICE}; if it is "
            "always the same batch, look at the data"
        )
