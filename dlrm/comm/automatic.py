"""`auto`: training begins dense, and goes on in what turns out to be the fastest way.

When a few steps have told what a step takes besides its exchange, candidates are timed on a real gradient,
and those that may be the fastest take turns in the steps that follow. All of that happens again if exchanges
get much slower or faster; all ranks at the same steps.
"""

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.collectives import Collective
from dlrm.comm.links import measure_links
from dlrm.comm.planner import Candidate, Estimate, decide, estimate, finalists, slowest
from dlrm.comm.replanning import Watch
from dlrm.comm.trial import Trial

DENSE_STEPS: Final = 10
"""Steps before the first plan; the first few are slower than those that follow."""
REMEMBERED_STEPS: Final = 5

logger = logging.getLogger(__name__)


class Automatic:
    """Plans, and plans again; see `dlrm.comm.exchange.Planner`.

    Args:
        candidates: to choose from, the same on all ranks; one of them is lossless.
        device: of the gradients.
        group: of the ranks; None: all.
    """

    def __init__(
        self, candidates: Sequence[Candidate], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._candidates = candidates
        self._device, self._group = device, group
        self._rests_s: deque[float] = deque([0.0], maxlen=REMEMBERED_STEPS)
        self._watch = Watch(device, group)
        self._steps = 0
        self._is_due = False
        self._trial: Trial | None = None
        self._estimates: list[Estimate] = []
        self._finalists: list[int] = []

    def choose(self, gradient: Tensor) -> Collective | None:
        """See `Planner`."""
        self._steps += 1
        if self._is_due or self._steps == DENSE_STEPS + 1:
            self._is_due = False
            self._begin(gradient)
        if self._trial is None:
            return None
        if not self._trial.is_over:
            return self._candidates[self._finalists[self._trial.turn]].collective
        trial, self._trial = self._trial, None
        return self._decide(trial.times_s)

    def observe(self, step_s: float, exchange_s: float) -> None:
        """See `Planner`."""
        if self._trial is not None:
            self._trial.observe(step_s)
        else:
            self._rests_s.append(max(0.0, step_s - exchange_s))
            if self._steps > DENSE_STEPS:
                self._is_due = self._watch.observe(exchange_s)

    def _begin(self, gradient: Tensor) -> None:
        """Find out who may be the fastest."""
        links = measure_links(self._device, self._group)
        self._estimates = estimate(self._candidates, gradient, links, self._group)
        (rest_of_step_s,) = slowest([median(self._rests_s)], self._device, self._group)
        self._finalists = finalists(self._estimates, rest_of_step_s)
        self._trial = Trial(len(self._finalists), self._device, self._group)
        if dist.get_rank(self._group) == 0:
            names = ", ".join(self._estimates[index].name for index in self._finalists)
            logger.info("exchange of dense gradients, %s; the next steps try %s", links.describe(), names)

    def _decide(self, times_s: Sequence[float]) -> Collective:
        made = decide(self._estimates, dict(zip(self._finalists, times_s, strict=True)))
        if dist.get_rank(self._group) == 0:
            logger.info("exchange of dense gradients:\n%s", made.describe())
        return self._candidates[made.chosen].collective
