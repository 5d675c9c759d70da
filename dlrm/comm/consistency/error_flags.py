"""A rank that cannot take part in a sum says so in the sum itself: in no message more, so that nobody hangs.

Where all values travel as they are, ranks tell each other nothing before. One that has no gradient then sends
zeros in its place, as many as the others wait for, and behind them that it objects; all hear of it in the
sum.

To read a number on a GPU is to wait for all that was asked of it before. It is read at once where the caller
waits as well, because scalars of the same sum tell it how to go on; else when it has long been there: where a
step's seconds are read, or before the next exchange.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from dlrm.comm.consistency.preflight import DisagreementError

NUM_PLACES: Final = 2
"""Of a sum, fp32: how many ranks object, and the sum of their numbers."""


class ErrorFlags:
    """Writes and reads them.

    Args:
        rank: this one.
        on_gpu: whether sums are made on a GPU.
    """

    def __init__(self, rank: int, on_gpu: bool) -> None:
        self._rank, self._on_gpu = rank, on_gpu
        self._unread: tuple[int, Tensor, torch.cuda.Event] | None = None

    def write(self, places: Tensor, problem: Exception | None) -> None:
        """Before the sum.

        Args:
            places: fp32 `[NUM_PLACES]` of what is summed, overwritten.
            problem: why this rank cannot take part; None: it can.
        """
        places.zero_()
        if problem is not None:
            places[0], places[1] = 1, self._rank

    def read(self, places: Tensor, problem: Exception | None, exchange: int, at_once: bool) -> None:
        """After the sum.

        Args:
            places: of the sum.
            problem: as before it.
            exchange: which one it is, counted from 1.
            at_once: the caller waits for the sum in any case.

        Raises:
            DisagreementError: another rank objects; on one with a problem, that.
        """
        if problem is not None:
            places.tolist()  # who leaves before its message is on its way lets others wait
            raise problem
        if self._on_gpu and not at_once:
            copied = places.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._unread = exchange, copied, event
        else:
            _check(places.tolist(), f"cannot take part in exchange {exchange:,}", "Nothing of it counts")

    def read_late(self) -> None:
        """What was there to be read before, and was not, for it would have meant to wait.

        Raises:
            DisagreementError: another rank has objected.
        """
        if self._unread is None:
            return
        exchange, places, event = self._unread
        self._unread = None
        event.synchronize()
        what = f"could not take part in exchange {exchange:,}, which was the last"
        _check(places.tolist(), what, "Replicas have parted since then: go back to a saved state")


def _check(places: Sequence[float], what: str, advice: str) -> None:
    num_ranks, sum_of_ranks = map(int, places)
    if num_ranks:
        who = f"rank {sum_of_ranks}" if num_ranks == 1 else f"{num_ranks} ranks"
        raise DisagreementError(f"{who} {what}: its own message says why. {advice}")
