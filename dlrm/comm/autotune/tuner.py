"""The exchange `auto`: training starts dense and continues with the exchange that turns out to be fastest.

After a few dense steps, which show how long a step takes without its exchange, candidates are timed on a real
gradient, and the fastest of them take turns in the following steps. A first choice may change while these
last. All of this is repeated, by all ranks at the same steps, if exchanges get much slower or faster.
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
    ExchangeEstimate,
    decide,
    describe,
    estimate,
    finalists,
    slowest,
)
from dlrm.comm.autotune.online_trial import OnlineTrial
from dlrm.comm.collectives.collective import Collective
from dlrm.comm.links import Links, measure_links

DENSE_STEPS: Final = 10
"""Dense steps before candidates are timed; the first few are slower than later ones."""
REMEMBERED_STEPS: Final = 5
"""Last steps whose time without the exchange is remembered."""
CHECK_STEPS: Final = 500
"""Steps between comparisons of all ranks' times."""
MOVED: Final = 1.5
"""Factor, up or down, by which the time of exchanges must have changed."""
CHECKS_PER_PROBE: Final = 20
"""Comparisons between measurements of links."""
LINKS_MOVED: Final = 2.0
"""Factor, up or down, by which the bandwidth of links must have changed."""

logger = logging.getLogger(__name__)


class ExchangeTuner:
    """Chooses the collective of each step, alike on all ranks, which call it together.

    Args:
        candidates: the same on all ranks, with different names; at least one is lossless.
    """

    def __init__(
        self, candidates: Sequence[Candidate], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._candidates = candidates
        self._device, self._group = device, group
        self._dense_steps_left = DENSE_STEPS
        self._rests_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._is_due = False
        self._estimates: list[ExchangeEstimate] = []
        self._trial: OnlineTrial | None = None
        self._drift = DriftDetector(device, group)
        self._best: Collective | None = None  # so far
        self.chosen: Collective | None = None
        """The chosen collective; None: not chosen yet."""

    @property
    def is_settled(self) -> bool:
        """Whether a collective is chosen and no trial is running."""
        return self.chosen is not None and self._trial is None

    def choose(self, gradient: Tensor) -> Collective | None:
        """Return the collective for the gradient, fp32 `[d]`, of this step; None: the same as before."""
        if self._is_due:
            self._is_due, self.chosen = False, None
            self._begin(gradient)
        turn = None if self._trial is None else self._trial.turn
        return self._best if turn is None else self._candidates[turn].collective

    def observe(self, step_s: float, exchange_s: float) -> None:
        """Record the seconds of a step and of the exchange in it; without them, nothing is ever chosen."""
        if self._trial is not None:
            if self._trial.observe(step_s):
                self._judge(self._trial)
            return
        # events and host clock differ a little, so that the difference may be below 0
        self._rests_s.append(max(0.0, step_s - exchange_s))
        if self.chosen is not None:
            self._is_due = self._drift.observe(exchange_s)
        else:
            self._dense_steps_left -= 1
            self._is_due = self._dense_steps_left <= 0

    def state_dict(self) -> dict[str, Any]:
        """The settled choice and the conditions under which it was made."""
        return {
            "num_ranks": dist.get_world_size(self._group),
            "chosen": self.chosen.name if self.chosen is not None and self.is_settled else None,
            "usual_s": self._drift.usual_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a choice that was made for as many ranks, or start over; drift is detected as usual."""
        self._dense_steps_left, self._is_due, self._trial = DENSE_STEPS, False, None
        self._rests_s.clear()
        self._drift = DriftDetector(self._device, self._group)
        self.chosen = self._best = None
        by_name = {each.name: each.collective for each in self._candidates}
        if state.get("num_ranks") == dist.get_world_size(self._group) and state["chosen"] in by_name:
            self.chosen = self._best = by_name[state["chosen"]]
            self._drift.usual_s = state["usual_s"]

    def _begin(self, gradient: Tensor) -> None:
        """Time the candidates, and start a trial if several may be the fastest."""
        links = self._drift.links = measure_links(self._device, self._group)
        self._estimates = estimate(self._candidates, gradient, links, self._group)
        (rest_of_step_s,) = slowest([median(self._rests_s)], self._device, self._group)
        found = finalists(self._estimates, rest_of_step_s)
        self._log(
            f"exchange of dense gradients, {links.describe()}; to be tried: "
            + ", ".join(self._estimates[index].name for index in found)
        )
        if len(found) > 1:
            self._trial = OnlineTrial(found, self._device, self._group)
            return
        alone_s = rest_of_step_s + (self._estimates[found[0]].timed_s or 0.0)
        self._adopt(*decide(self._estimates, {found[0]: alone_s}), is_final=True)

    def _judge(self, trial: OnlineTrial) -> None:
        """After a round, use the best candidate until the next round, or for good."""
        chosen, estimates = decide(self._estimates, trial.times_s)
        self._best = self._candidates[chosen].collective
        if trial.is_conclusive:
            self._adopt(chosen, estimates, trial.is_over)
        if trial.is_over:
            self._trial = None

    def _adopt(self, chosen: int, estimates: Sequence[ExchangeEstimate], is_final: bool) -> None:
        before, self.chosen = self.chosen, self._candidates[chosen].collective
        self._best = self.chosen
        if is_final or self.chosen is not before:
            so_far = "" if is_final else " (so far)"
            self._log(f"exchange of dense gradients{so_far}:\n{describe(estimates)}")

    def _log(self, message: str) -> None:
        if dist.get_rank(self._group) == 0:
            logger.info("%s", message)


class DriftDetector:
    """Detects by the time of exchanges that links have changed, as other jobs start and end.

    A rank that is early waits for the others in its exchange, so that the smallest median of all ranks
    counts, that of the rank that came last. As a sparse exchange hardly gets faster on a faster link, links
    are also measured again, rarely.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self._seen_s: list[float] = []
        self.usual_s: float | None = None
        """Seconds of exchanges at the first comparison; None: not compared yet."""
        self.links: Links | None = None
        """Links at the time of the choice; None: unknown, the next measurement stands for them."""
        self._num_checks = 0

    def observe(self, exchange_s: float) -> bool:
        """Record this step's exchange and return whether to choose again, the same on all ranks."""
        self._seen_s.append(exchange_s)
        if len(self._seen_s) < CHECK_STEPS:
            return False
        now = torch.tensor([median(self._seen_s)], dtype=torch.float64, device=self._device)
        self._seen_s.clear()
        dist.all_reduce(now, op=dist.ReduceOp.MIN, group=self._group)
        now_s = float(now)
        usual_s = self.usual_s
        moved = usual_s is not None and not usual_s / MOVED <= now_s <= usual_s * MOVED
        self._num_checks += 1
        if not moved and self._num_checks % CHECKS_PER_PROBE == 0:
            moved = self._have_links_moved()
        if moved or usual_s is None:
            # the first steps after a new choice are the new reference
            self.usual_s = None if moved else now_s
        return moved

    def _have_links_moved(self) -> bool:
        now = measure_links(self._device, self._group)
        before = self.links = self.links or now
        ratio = now.slowest.bytes_per_s / before.slowest.bytes_per_s
        return max(ratio, 1 / ratio) > LINKS_MOVED
