"""Writes replicated state that lives on a GPU into shared memory a step later, so that no step waits for it.

To copy from a GPU is to wait for all that is queued there. So a state is only begun to be copied after its
step, into page-locked memory, and written when the next one is given: by then its copy has long arrived.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cpr.checkpoint.format.tree_file import Leaf, encode
from cpr.resident.replica import Replica

POLL_S: Final = 0.001


class _Given(NamedTuple):
    """A state whose copy is under way."""

    step: int
    encoded: Any
    leaves: list[Leaf]
    copied: torch.cuda.Event


class LateState:
    """Writes states into a replica; the one that was given last may not count yet.

    Args:
        replica: where to.
        finished: called with the step of a state that counts from now on.
    """

    def __init__(self, replica: Replica, finished: Callable[[int], object]) -> None:
        self._replica, self._finished = replica, finished
        self._given: _Given | None = None
        self._alone = threading.Lock()

    def give(self, step: int, tree: Any) -> None:
        """Begin to copy a state, as for `Replica.write`, and write the one before; it may change afterwards.

        Raises:
            ValueError, NotEnoughMemoryError: as `Replica.write`.
        """
        with self._alone:
            if self._given is not None:
                self._given.copied.synchronize()
                self._write(self._given)
            encoded, leaves = encode(tree)
            copies = [Leaf(leaf.path, _copy(leaf.value)) for leaf in leaves]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._given = _Given(step, encoded, copies, copied)

    def forget(self) -> None:
        """Drop the state that was given last, before a newer one is written by other means."""
        with self._alone:
            self._given = None

    def settle(self, timeout_s: float) -> int | None:
        """Write the state that was given last, if its copy arrives in time; from any thread.

        Returns:
            The step whose state is lost, as its copy did not arrive; None: none.
        """
        deadline = time.monotonic() + timeout_s
        if not self._alone.acquire(timeout=timeout_s):  # the main thread hangs in `give`
            return None if self._given is None else self._given.step
        try:
            while self._given is not None:
                if self._given.copied.query():  # type: ignore[no-untyped-call]
                    self._write(self._given)
                elif time.monotonic() > deadline:
                    return self._given.step
                else:
                    time.sleep(POLL_S)
            return None
        finally:
            self._alone.release()

    def _write(self, given: _Given) -> None:
        self._replica.write_leaves(given.step, given.encoded, given.leaves)
        self._finished(given.step)
        self._given = None


def _copy(value: Any) -> Any:
    """A value that stays as it is now; one from a GPU arrives in page-locked memory, later."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if value.device.type == "cpu" else value.to("cpu", non_blocking=True)
    return value if isinstance(value, bytes) else value.copy()
