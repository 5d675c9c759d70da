"""Detects that links have changed, as other jobs start and end, so that the exchange is chosen again.

Usually the time of exchanges shows it. As a sparse exchange hardly gets faster on a faster link, links are
also measured again, rarely. Both cost messages between ranks.
"""

from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.links import Links, measure_links

CHECK_STEPS: Final = 500
"""Steps between comparisons of all ranks' times."""
MOVED: Final = 1.5
"""Factor, up or down, by which the time of exchanges must have changed."""
CHECKS_PER_PROBE: Final = 20
"""Comparisons between measurements of links."""
LINKS_MOVED: Final = 2.0
"""Factor, up or down, by which the bandwidth of links must have changed."""


class DriftDetector:
    """Compares the time of exchanges with that of the first steps after a choice.

    A rank that is early waits for the others in its exchange, so that the smallest median of all ranks
    counts, that of the rank that came last.
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
            self.usual_s = (
                None if moved else now_s
            )  # the first steps after a new choice are the new reference
        return moved

    def _have_links_moved(self) -> bool:
        now = measure_links(self._device, self._group)
        before = self.links = self.links or now
        ratio = now.slowest.bytes_per_s / before.slowest.bytes_per_s
        return max(ratio, 1 / ratio) > LINKS_MOVED
