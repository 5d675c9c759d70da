"""`auto`: training begins dense, and goes on in what turns out to be the fastest way.

Candidates are timed on a real gradient, when a few steps have told what a step takes besides its exchange,
and again if exchanges get much slower or faster; all ranks at the same steps.
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
from dlrm.comm.planner import Candidate, plan
from dlrm.comm.replanning import Watch

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

    def choose(self, gradient: Tensor) -> Collective | None:
        """See `Planner`."""
        self._steps += 1
        if not self._is_due and self._steps != DENSE_STEPS + 1:
            return None
        self._is_due = False
        links = measure_links(self._device, self._group)
        made = plan(
            self._candidates, gradient, links, rest_of_step_s=median(self._rests_s), group=self._group
        )
        if dist.get_rank(self._group) == 0:
            logger.info("exchange of dense gradients, %s:\n%s", links.describe(), made.describe())
        return self._candidates[made.chosen].collective

    def observe(self, step_s: float, exchange_s: float) -> None:
        """See `Planner`."""
        self._rests_s.append(max(0.0, step_s - exchange_s))
        if self._steps > DENSE_STEPS:
            self._is_due = self._watch.observe(exchange_s)
