"""What evaluations decide: which state is kept as the best, and whether training stops early.

The best state is a checkpoint in a directory of its own, which holds its metric, too: the record of what is
kept survives whatever happens to the run. How long nothing improved is part of the run's own checkpoints, so
that a run which goes back to an older state counts again from there.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch.distributed as dist

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.errors import CheckpointError, CorruptFileError
from dlrm.config.goal import Goal
from dlrm.launch.device import of_rank_0
from dlrm.metrics import MetricValues
from dlrm.telemetry.report import BestReport

RECORD: Final = "best"
"""Name of the registered state that holds a `Record`."""

POLL_S: Final = 0.02
"""How often ranks that wait for a save look whether it is finished, or a signal came."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was evaluated, saved with its state."""

    run: str
    """Name of the run folder."""
    metric: str
    days: list[int]
    """Days that were evaluated."""
    value: float
    step: int

    def state_dict(self) -> dict[str, Any]:
        """The record as a registered state."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: who loads a best state takes the model, not the record."""


class Patience:
    """Counts evaluations in a row that did not improve the metric.

    Args:
        goal: the metric.
        limit: training is over after this many; 0: never.
        min_improvement: smaller improvements do not count.
    """

    def __init__(self, goal: Goal, limit: int, min_improvement: float) -> None:
        self._goal, self._limit, self._min_improvement = goal, limit, min_improvement
        self._reference: float | None = None
        self._step = -1
        self.waited = 0
        """Evaluations since the last one that improved the metric."""

    @property
    def is_over(self) -> bool:
        """Whether training has waited long enough."""
        return 0 < self._limit <= self.waited

    def observe(self, step: int, value: float | None) -> None:
        """Count the evaluation after a step, unless that was done; None is no improvement."""
        if step == self._step:
            return
        self._step = step
        reference = self._reference
        if value is not None and (
            reference is None or self._goal.is_better(value, reference, self._min_improvement)
        ):
            self._reference, self.waited = value, 0
        else:
            self.waited += 1

    def state_dict(self) -> dict[str, Any]:
        """The count, and what it refers to."""
        return {
            "metric": self._goal.text,
            "reference": self._reference,
            "step": self._step,
            "waited": self.waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting; a run that is resumed with another metric counts from 0."""
        if state.get("metric") == self._goal.text:
            self._reference, self._step, self.waited = state["reference"], state["step"], state["waited"]


class BestSave:
    """Keeps the best evaluated state in a checkpoint directory. All ranks call its methods together.

    Args:
        uri: of the directory.
        goal: what makes a state the best.
        run: name of the run folder.
        days: days that evaluations are about.
        open_checkpointer: opens a checkpointer of that directory which has every state registered; it is
            closed after each save, so that its memory is free during training.
    """

    def __init__(
        self,
        uri: str,
        goal: Goal,
        run: str,
        days: Sequence[int],
        open_checkpointer: Callable[[str], Checkpointer],
    ) -> None:
        self.uri = uri
        self._goal, self._run, self.days = goal, run, [*days]
        self._open = open_checkpointer
        self.kept: Record | None = None
        """The best state as far as known; None: there is none, or it cannot be read now."""
        self.missed: float | None = None
        """The best value whose state could not be written since this start of the run; None: all could."""

    def begin(self, is_new: bool) -> None:
        """Find out what an earlier start of the run has kept; `is_new` if the run begins at its beginning.

        Raises:
            ValueError: the directory holds the best state of another run.
        """
        try:
            with self._open(self.uri) as checkpointer:
                found = _read(checkpointer, checkpointer.newest_state())
        except CheckpointError as error:  # storage may be back by the time of the first evaluation
            _log(logging.WARNING, f"it is not known which best state was kept before: {error}")
            return
        if found is not None and is_new and found.run != self._run:
            raise ValueError(
                f"{self.uri} holds the best state of run {found.run}: set checkpoint.uri to another place, "
                "or remove it"
            )
        self.kept = self._comparable(found)
        if found is not None and self.kept is None:
            _log(
                logging.INFO,
                f"{self.uri} holds the best state by {found.metric} on days {found.days}, which cannot "
                f"be compared with {self._goal.text} on days {self.days}: the next one replaces it",
            )

    def is_better(self, value: float) -> bool:
        """Whether a state with this value is better than the kept one."""
        return self.kept is None or self._goal.is_better(value, self.kept.value)

    def keep(self, step: int, value: float, before_wait: Callable[[], None]) -> None:
        """Save the present state if it is better than what the directory holds, and wait for the commit.

        A failure is logged: the directory still holds the state before.

        Args:
            step: training steps done.
            value: of the metric.
            before_wait: called now and then while the ranks wait, equally often on all of them; may raise to
                stop, which gives the save up.
        """
        began = time.monotonic()
        record = Record(run=self._run, metric=self._goal.text, days=self.days, value=value, step=step)
        try:
            with self._open(self.uri) as checkpointer:
                state, _ = checkpointer.continue_live(step)
                self.kept = self._comparable(_read(checkpointer, state))
                if not self.is_better(value):
                    return
                checkpointer.register(RECORD, record)
                checkpointer.save("consistent")
                while not checkpointer.is_free():
                    before_wait()
                    time.sleep(POLL_S)
        except CheckpointError as error:
            _log(logging.ERROR, f"the best state so far cannot be kept: {error}. Training continues")
            if self.missed is None or self._goal.is_better(value, self.missed):
                self.missed = value
            return
        self.kept = record
        _log(
            logging.INFO,
            f"the {self._goal.label} {value:.4f} at step {step} is the best so far: its state is kept in "
            f"{self.uri}, written in {time.monotonic() - began:.1f} s",
        )

    def _comparable(self, found: Record | None) -> Record | None:
        """The record, if its value can be compared with those to come."""
        mine = (self._goal.text, self.days)
        return found if found is not None and (found.metric, found.days) == mine else None


def _read(checkpointer: Checkpointer, state: State | None) -> Record | None:
    """Read the record that was saved with a state; None if there is none, or it is damaged."""
    if state is None:
        return None
    try:
        return Record(**checkpointer.registered_in(state, RECORD))
    except CorruptFileError as error:
        _log(logging.WARNING, f"the kept best state does not count, and the next one replaces it: {error}")
        return None


def _log(level: int, message: str) -> None:
    """Log on rank 0, because all ranks know the same."""
    if dist.get_rank() == 0:
        logger.log(level, "%s", message)


class Selection:
    """Judges evaluations; this base class keeps no state and never stops early."""

    @property
    def why_over(self) -> str:
        """Why training stops early; empty if it does not."""
        return ""

    @property
    def report(self) -> BestReport | None:
        """The kept state and the early stop, for the final report; None: nothing was to be kept."""
        return None

    def begin(self, is_new: bool) -> None:
        """Called when the run's state is restored; `is_new` if the run begins at its beginning."""

    def judge(
        self, step: int, values: MetricValues, before_wait: Callable[[], None], *, is_last: bool
    ) -> None:
        """Take note of the evaluation after a step; `is_last` if training ends anyway.

        For `before_wait` see `BestSave.keep`.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the judgement of later evaluations depends on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the state of an earlier start of the run."""


class BestSelection(Selection):
    """Keeps the best state, and stops when training has waited long enough for a better one.

    Rank 0 decides for all: ranks on other processors may compute other last digits.
    """

    def __init__(self, goal: Goal, best: BestSave, patience: Patience) -> None:
        self._goal, self._best, self._patience = goal, best, patience

    @property
    def why_over(self) -> str:
        """Why training stops early; empty if it does not."""
        if not self._patience.is_over:
            return ""
        waited = self._patience.waited
        return f"no better {self._goal.label} in {waited} evaluation{'s' if waited > 1 else ''}"

    @property
    def report(self) -> BestReport:
        """The kept state and the early stop, for the final report."""
        kept, missed = self._best.kept, self._best.missed
        return BestReport(
            metric=self._goal.label,
            value=None if kept is None else kept.value,
            step=None if kept is None else kept.step,
            uri=self._best.uri,
            missed=missed if missed is not None and self._best.is_better(missed) else None,
            stopped_early=self.why_over,
        )

    def begin(self, is_new: bool) -> None:
        """Find out what an earlier start of the run has kept; see `BestSave.begin`."""
        self._best.begin(is_new)

    def judge(
        self, step: int, values: MetricValues, before_wait: Callable[[], None], *, is_last: bool
    ) -> None:
        """Keep the state if it is the best so far, and count the evaluation unless it is the last."""
        value = of_rank_0(lambda: self._goal.value_in(values))
        if value is None:
            reason = f"the {self._goal.label} is not defined, which is no improvement: {values.note}"
            _log(logging.WARNING, reason)
        if value is not None and of_rank_0(lambda: self._best.is_better(value)):
            self._best.keep(step, value, before_wait)
        if not is_last:
            self._patience.observe(step, value)
            if self._patience.is_over:
                _log(logging.INFO, f"training stops early, after step {step}: {self.why_over}")

    def state_dict(self) -> dict[str, Any]:
        """How long nothing improved."""
        return {"days": self._best.days, **self._patience.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the count of an earlier start of the run, unless that evaluated other days."""
        if state.get("days") == self._best.days:
            self._patience.load_state_dict(state)
