"""Error flags inside a sum, by which a rank that fails informs the others without another message.

Dense fp32 sums have no preflight. A rank without a gradient sends zeros instead, as many as the other ranks
wait for, and behind them sets a flag that all ranks read from the sum.

To read a number from a GPU is to wait for all queued work. Flags are read at once where the caller waits in
any case, as for scalars of the same sum; otherwise at the step's end or before the next exchange, when their
copy has long arrived.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from dlrm.comm.consistency.preflight import DisagreementError

NUM_FLAGS: Final = 2
"""fp32 values at the end of a sum: the number of failed ranks, and the sum of their rank numbers."""


class ErrorFlags:
    """Writes this rank's error flag into a vector before its sum, and reads all ranks' flags afterwards.

    Args:
        rank: of this process.
        on_gpu: whether the sums are made on a GPU.
    """

    def __init__(self, rank: int, on_gpu: bool) -> None:
        self._rank, self._on_gpu = rank, on_gpu
        self._unread: tuple[int, Tensor, torch.cuda.Event] | None = None

    def write(self, flags: Tensor, problem: Exception | None) -> None:
        """Overwrite the last `NUM_FLAGS` values of a vector: zeros, or this rank's `problem`."""
        flags.zero_()
        if problem is not None:
            flags[0], flags[1] = 1, self._rank

    def read(self, flags: Tensor, problem: Exception | None, exchange: int, at_once: bool) -> None:
        """Check the summed flags, now or, on a GPU, later.

        Args:
            flags: fp32 `[NUM_FLAGS]`, summed.
            problem: as given to `write`.
            exchange: number of the exchange, counted from 1.
            at_once: whether the caller waits for the sum in any case.

        Raises:
            DisagreementError: another rank has failed; a failed rank raises its own problem.
        """
        if problem is not None:
            flags.tolist()  # a rank that ends before its message is sent would leave the others waiting
            raise problem
        if self._on_gpu and not at_once:
            copied = flags.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._unread = exchange, copied, event
        else:
            _check(flags.tolist(), f"cannot take part in exchange {exchange:,}", "Nothing of it counts")

    def read_late(self) -> None:
        """Check flags whose copy was still under way in `read`.

        Raises:
            DisagreementError: another rank had failed.
        """
        if self._unread is None:
            return
        exchange, flags, event = self._unread
        self._unread = None
        event.synchronize()
        what = f"could not take part in exchange {exchange:,}, which was the last"
        _check(flags.tolist(), what, "Replicas differ since then: go back to a saved state")


def _check(flags: Sequence[float], what: str, advice: str) -> None:
    num_ranks, sum_of_ranks = map(int, flags)
    if num_ranks:
        who = f"rank {sum_of_ranks}" if num_ranks == 1 else f"{num_ranks} ranks"
        raise DisagreementError(f"{who} {what}: its own message says why. {advice}")
