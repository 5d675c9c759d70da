"""The training loop: batch, forward, backward, average, update, tell."""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from data.batch import Batch
from data.loader import DataLoader
from dlrm.config.schema import TrainConfig
from dlrm.dense_sync import DenseSync
from dlrm.fault_tolerance.session import Session
from dlrm.launch.stop_signal import StopSignal
from dlrm.metrics import MetricValues
from dlrm.optim.build import Optimizers
from dlrm.optim.norms import local_norms
from dlrm.sharding.parameters import dense_parameters
from dlrm.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

NUM_SCALARS = 4  # that travel with the gradients: loss, soundness, wish to stop, wish to stop at once


ADVICE = (
    "Lower dense.learning_rate and tables.learning_rate, or lengthen schedule.warmup_steps, and begin again, "
    "or --resume from what was saved"
)


class DivergedError(FloatingPointError):
    """The loss, a gradient or a parameter is NaN or infinite; the message names step, batch and ranks."""


@dataclass(kw_only=True)
class Trainer:
    """Trains a model until its steps are done, somebody asks to stop, or the loss is no number.

    Everything is built before; see `dlrm.training.build`.
    """

    config: TrainConfig
    model: nn.Module
    """Gives fp32 logits `[B]`; updates its tables in the backward pass."""
    optimizers: Optimizers
    replicas: DenseSync
    loader: DataLoader
    evaluate: Callable[[Callable[[], None]], MetricValues]
    """Measures the model; calls what it is given before each batch, on all ranks alike."""
    telemetry: Recorder
    session: Session
    stop: StopSignal
    device: torch.device
    steps_done: int = 0
    samples_done: int = 0

    def train(self) -> None:
        """Run to the end.

        Raises:
            DivergedError: the loss, a dense gradient or a dense parameter is no number. Rows of tables may
                be none either by then: nobody may go on with them.
            StopRequested: somebody asked to stop; the last step is complete on all ranks, and saved where
                that was asked for and there was time.
        """
        self.session.restore()
        self.telemetry.begin()
        if lost := self.replicas.settle():
            logger.warning("lost %s", lost)
        with self.stop.deferred():
            self._run()
        self.telemetry.exchange(self.replicas.take_figures())  # of the steps since the last that were logged
        with self.stop.extended(self.session.leaving_takes):  # to finish is as good as to save and leave
            self.session.finish()
        self._tell_costs()

    def state_dict(self) -> dict[str, Any]:
        """How far training is."""
        return {
            "steps_done": self.steps_done,
            "samples_done": self.samples_done,
            "replicas": self.replicas.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps_done, self.samples_done = state["steps_done"], state["samples_done"]
        self.replicas.load_state_dict(state.get("replicas", {}), self.steps_done)  # older runs have none

    def should_continue(self) -> bool:
        """Whether epochs and steps are left."""
        if self.config.max_steps and self.steps_done >= self.config.max_steps:
            return False
        return self.loader.epoch < self.config.epochs

    def check_parameters(self) -> None:
        """Refuse to go on with, or to save, dense parameters that are no numbers; when replicas have joined.

        The loss does not tell: a fused ReLU makes 0 of NaN, and all samples get the same finite logit. Nor do
        gradients tell of the last update.

        Raises:
            DivergedError: names the parameter.
        """
        sums = torch.stack([parameter.detach().sum() for parameter in self._dense.values()])
        if sums.isfinite().all():
            return
        bad = [name for name, total in zip(self._dense, sums.tolist(), strict=True) if not isfinite(total)]
        raise DivergedError(
            f"parameter {bad[0]} has values that are no numbers after step {self.steps_done}, perhaps "
            f"because a table has. {ADVICE}"
        )

    @cached_property
    def _dense(self) -> dict[str, nn.Parameter]:
        """The dense parameters by name."""
        dense = {id(parameter) for parameter in dense_parameters(self.model)}
        return {name: each for name, each in self.model.named_parameters() if id(each) in dense}

    def _run(self) -> None:
        evaluated_at = -1
        if self.steps_done and self._should_evaluate():  # saved after this step, but before its evaluation
            self._evaluate()
            evaluated_at = self.steps_done
        while self.should_continue():
            for batch in self.loader:
                if self.session.batches_to_skip:
                    self.session.note_skipped()
                    continue
                self._train_on(batch)
                if self._should_evaluate():
                    self._evaluate()
                    evaluated_at = self.steps_done
                if not self.should_continue():
                    break
        self._save_end()
        if evaluated_at != self.steps_done:
            self._evaluate()

    def _should_evaluate(self) -> bool:
        """Whether it is time to; at the end of training it is not yet, because that is saved first."""
        every = self.config.evaluate_every_steps
        return every > 0 and self.steps_done % every == 0 and not self._is_at_end()

    def _is_at_end(self) -> bool:
        is_last_epoch = self.loader.epoch + 1 == self.config.epochs
        return not self.should_continue() or (is_last_epoch and self.loader.steps_left == 0)

    def _save_end(self) -> None:
        """What training has come to must not depend on an evaluation, which may find its data damaged."""
        self.replicas.join()
        with self.stop.extended(self.session.leaving_takes):  # as good as to save and leave
            self.session.save_end()

    def _evaluate(self) -> None:
        self._leave_if_any_was_asked()
        self.replicas.join()
        self.check_parameters()
        values = self.evaluate(self._before_evaluated_batch)
        self.telemetry.evaluation(step=self.steps_done, samples=self.samples_done, values=values)

    def _tell_costs(self) -> None:
        self.telemetry.costs(self.session.take_save_costs(), self.session.recoveries)

    def _train_on(self, batch: Batch) -> None:
        began_s = time.perf_counter()
        batch = batch.to(self.device, non_blocking=True)
        self.optimizers.begin_step(self.steps_done)
        logits = self.model(batch.dense, batch.sparse)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        soundness = self._soundness().to(loss.device)
        scalars = torch.cat([torch.stack([loss.detach(), soundness]), loss.new_tensor(self._wishes)])
        mean_loss, mean_soundness, stop, at_once = self.replicas.average(scalars).tolist()
        if not isfinite(mean_loss + mean_soundness):
            self._raise_diverged(loss.detach(), soundness)
        self.optimizers.step()
        self.replicas.updated(time.perf_counter() - began_s)
        self.steps_done += 1
        if self._is_logged(self.steps_done):
            self.telemetry.exchange(self.replicas.take_figures())
        self.samples_done += batch.labels.numel() * dist.get_world_size()
        self.telemetry.step(
            step=self.steps_done,
            samples=self.samples_done,
            loss=loss,
            logits=logits,
            labels=batch.labels,
            learning_rates=self.optimizers.learning_rates,
        )
        self.session.step()
        if self._is_logged(self.steps_done):
            self._tell_costs()
        if stop:
            self._leave(at_once=bool(at_once))

    @property
    def _wishes(self) -> list[float]:
        """What this rank was asked: to stop, and to stop at once."""
        return [float(self.stop.requested), float(self.stop.signum == signal.SIGINT)]

    def _leave_if_any_was_asked(self) -> None:
        """Where no gradients travel: a rank that left alone would let the others wait in a collective."""
        wishes = self._wishes
        if dist.get_world_size() > 1:
            both = torch.tensor(wishes, device=self.device)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            wishes = both.tolist()
        stop, at_once = wishes
        if stop:
            self._leave(at_once=bool(at_once))

    def _before_evaluated_batch(self) -> None:
        self._leave_if_any_was_asked()
        self.telemetry.evaluating()

    def _leave(self, at_once: bool) -> None:
        if not at_once:
            self.replicas.join()
            with self.stop.extended(self.session.leaving_takes):
                self.session.leave(timedelta(seconds=self.stop.seconds_since))
        self.stop.leave()

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_every_steps == 0

    def _soundness(self) -> Tensor:
        """A number if all dense gradients are numbers, and, in steps that are logged, all dense parameters.

        It waits for nothing, and ranks tell each other with the loss: parameters may be apart or, in part,
        of the step before. Gradients tell at once of rows that are no numbers, whatever a ReLU makes of them;
        where they are on their way already (`comm.exchange=priority`), parameters tell a step later.
        """
        tensors = [each.grad for each in self._dense.values() if each.grad is not None]
        if not tensors or self._is_logged(self.steps_done + 1):
            tensors += self._dense.values()
        return local_norms([each.detach() for each in tensors]).sum()

    def _raise_diverged(self, loss: Tensor, soundness: Tensor) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (loss.item(), soundness.item()))
        ranks = [rank for rank, (value, _) in enumerate(found) if not isfinite(value)]
        if ranks:
            what = f"the loss is {found[ranks[0]][0]}"
        else:
            self.check_parameters()
            ranks = [rank for rank, (_, value) in enumerate(found) if not isfinite(value)]
            what = "gradients outside the tables are no numbers"
        batch = sum(phase["steps"] for phase in self.loader.state_dict()["phases"])
        raise DivergedError(
            f"{what} at step {self.steps_done + 1} (epoch {self.loader.epoch}, batch {batch} of it, rank "
            f"{', '.join(map(str, ranks))}). {ADVICE}; if it is always the same batch, look at "
            "the data"
        )
