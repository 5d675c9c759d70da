"""`auto`: training begins dense, and goes on in what turns out to be the fastest way.

When a few steps have told what a step takes besides its exchange, candidates are timed on a real gradient,
and those that may be the fastest take turns in the steps that follow. What is chosen after some of these
turns may still change while they last. All of that happens again if exchanges get much slower or faster; all
ranks at the same steps.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.autotune.candidates import (
    Candidate,
    Estimate,
    ExchangePlan,
    decide,
    estimate,
    finalists,
    slowest,
)
from dlrm.comm.autotune.drift import DriftDetector
from dlrm.comm.autotune.online_trial import OnlineTrial
from dlrm.comm.collectives import Collective
from dlrm.comm.links import measure_links

DENSE_STEPS: Final = 10
"""Steps before the first plan; the first few are slower than those that follow."""
REMEMBERED_STEPS: Final = 5

logger = logging.getLogger(__name__)


class ExchangeTuner:
    """Plans, and plans again; see `dlrm.comm.exchange.Planner`.

    Args:
        candidates: to choose from, the same on all ranks, each with a name of its own; one is lossless.
        device: of the gradients.
        group: of the ranks; None: all.
    """

    def __init__(
        self, candidates: Sequence[Candidate], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._candidates = candidates
        self._device, self._group = device, group
        self._dense_steps_left = DENSE_STEPS
        self._rests_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._is_due = False
        self._estimates: list[Estimate] = []
        self._trial: OnlineTrial | None = None
        self._watch = DriftDetector(device, group)
        self._best: Collective | None = None  # so far
        self.chosen: Collective | None = None
        """See `Planner`."""

    @property
    def is_settled(self) -> bool:
        """See `Planner`."""
        return self.chosen is not None and self._trial is None

    def choose(self, gradient: Tensor) -> Collective | None:
        """See `Planner`."""
        if self._is_due:
            self._is_due, self.chosen = False, None
            self._begin(gradient)
        turn = None if self._trial is None else self._trial.turn
        return self._best if turn is None else self._candidates[turn].collective

    def observe(self, step_s: float, exchange_s: float) -> None:
        """See `Planner`."""
        if self._trial is not None:
            if self._trial.observe(step_s):
                self._judge(self._trial)
            return
        self._rests_s.append(max(0.0, step_s - exchange_s))
        if self.chosen is not None:
            self._is_due = self._watch.observe(exchange_s)
        else:
            self._dense_steps_left -= 1
            self._is_due = self._dense_steps_left <= 0

    def state_dict(self) -> dict[str, Any]:
        """See `Planner`."""
        return {
            "num_ranks": dist.get_world_size(self._group),
            "chosen": self.chosen.name if self.chosen is not None and self.is_settled else None,
            "usual_s": self._watch.usual_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Planner`; if exchanges then take another time than they did, everything is tried again."""
        self._dense_steps_left, self._is_due, self._trial = DENSE_STEPS, False, None
        self._rests_s.clear()
        self._watch = DriftDetector(self._device, self._group)
        self.chosen = self._best = None
        by_name = {each.name: each.collective for each in self._candidates}
        if state.get("num_ranks") == dist.get_world_size(self._group) and state["chosen"] in by_name:
            self.chosen = self._best = by_name[state["chosen"]]
            self._watch.usual_s = state["usual_s"]

    def _begin(self, gradient: Tensor) -> None:
        """Find out who may be the fastest, and let them take turns if they are several."""
        links = self._watch.links = measure_links(self._device, self._group)
        self._estimates = estimate(self._candidates, gradient, links, self._group)
        (rest_of_step_s,) = slowest([median(self._rests_s)], self._device, self._group)
        found = finalists(self._estimates, rest_of_step_s)
        self._tell(
            f"exchange of dense gradients, {links.describe()}; to be tried: "
            + ", ".join(self._estimates[index].name for index in found)
        )
        if len(found) > 1:
            self._trial = OnlineTrial(found, self._device, self._group)
            return
        alone_s = rest_of_step_s + (self._estimates[found[0]].timed_s or 0.0)
        self._take(decide(self._estimates, {found[0]: alone_s}), is_final=True)

    def _judge(self, trial: OnlineTrial) -> None:
        """A round is over: who is best now goes on between it and the next, or for good."""
        made = decide(self._estimates, trial.times_s)
        self._best = self._candidates[made.chosen].collective
        if trial.is_telling:
            self._take(made, trial.is_over)
        if trial.is_over:
            self._trial = None

    def _take(self, made: ExchangePlan, is_final: bool) -> None:
        before, self.chosen = self.chosen, self._candidates[made.chosen].collective
        self._best = self.chosen
        if is_final or self.chosen is not before:
            so_far = "" if is_final else " (so far)"
            self._tell(f"exchange of dense gradients{so_far}:\n{made.describe()}")

    def _tell(self, message: str) -> None:
        if dist.get_rank(self._group) == 0:
            logger.info("%s", message)
