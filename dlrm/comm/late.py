"""Reading of scalars without waiting for a GPU's queued work."""

from typing import Generic, TypeVar

import torch
from torch import Tensor

About = TypeVar("About")


class LateScalars(Generic[About]):
    """Reads the scalars of a step: on the CPU at once, on a GPU when those of the next step are given.

    To read a number from a GPU is to wait for all queued work. A step later its copy has long arrived, and
    the GPU computes while the host looks.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._unread: tuple[Tensor, torch.cuda.Event, About] | None = None

    def give(self, scalars: Tensor, about: About) -> tuple[list[float], About] | None:
        """Give scalars `[n]`, and what they are about; returns the newest that can be read.

        On a GPU these are those given before; None: there are none.
        """
        if not self._on_gpu:
            return scalars.tolist(), about
        before = self.take()
        copied = scalars.detach().to("cpu", non_blocking=True)  # into pinned memory
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._unread = copied, event, about
        return before

    def take(self) -> tuple[list[float], About] | None:
        """Wait for the scalars that were given last; None: there are none, or they were returned."""
        if self._unread is None:
            return None
        scalars, event, about = self._unread
        self._unread = None
        event.synchronize()
        return scalars.tolist(), about
