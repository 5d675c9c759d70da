"""When to plan again: links change, as other jobs come and go, but asking all ranks costs an exchange too.

An exchange that takes another time than it did tells that, but not always: one that sends little hardly gets
faster on a link that others have left. So links are measured again, too, rarely.
"""

from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.links import Links, measure_links

CHECK_STEPS: Final = 500
"""Steps between the times that ranks compare what they see."""
MOVED: Final = 1.5
"""Factor, up or down, by which exchanges must have changed."""
CHECKS_PER_PROBE: Final = 20
"""Links are measured at each so-manieth comparison."""
LINKS_MOVED: Final = 2.0
"""Factor, up or down, by which the bandwidth of links must have changed."""


class DriftDetector:
    """Compares the time of exchanges with that of the first steps after a plan.

    A rank that is early waits for the others in its exchange, so that the least of all ranks' medians
    counts: the time of who came last.

    Args:
        device: on which the group's backend exchanges tensors.
        group: None is all ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self._seen_s: list[float] = []
        self.usual_s: float | None = None
        """What exchanges took when they were first compared; None: they were not yet."""
        self.links: Links | None = None
        """As they were when that was planned; None: nobody has told, and they are what is measured next."""
        self._num_checks = 0

    def observe(self, exchange_s: float) -> bool:
        """Whether to plan again now: the same answer on all ranks, which call it once a step.

        Args:
            exchange_s: what the exchange of this step took on this rank.
        """
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
            self.usual_s = None if moved else now_s  # after a new plan, its first steps are the measure
        return moved

    def _have_links_moved(self) -> bool:
        now = measure_links(self._device, self._group)
        before = self.links = self.links or now
        ratio = now.slowest.bytes_per_s / before.slowest.bytes_per_s
        return max(ratio, 1 / ratio) > LINKS_MOVED
