"""Orders the GPU work of a training loop and of a background thread; does nothing on the CPU.

Calls only queue work on a GPU. Tensors that one thread passes to another therefore need an event, for which
the other thread's stream waits.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch


class SideStream:
    """A CUDA stream for the background thread, and events by which each side waits for the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._given: dict[int, torch.cuda.Event] = {}
        self._returned: dict[int, torch.cuda.Event] = {}

    def give(self, key: int, finish: bool) -> None:
        """Record that the calling thread's queued work makes `key` ready.

        Args:
            key: identifies the input of background work.
            finish: wait until it is ready, so that times can be measured.
        """
        if self._stream is not None:
            self._given[key] = torch.cuda.current_stream(self._device).record_event()
            if finish:
                self._given[key].synchronize()

    @contextlib.contextmanager
    def background(self, keys: Iterable[int], number: int, finish: bool) -> Iterator[None]:
        """Run background work on the side stream, after its inputs.

        Args:
            keys: inputs recorded by `give`.
            number: identifies this work for `take`.
            finish: wait until it is done.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for key in keys:
                self._stream.wait_event(self._given[key])
            yield
            self._returned[number] = self._stream.record_event()
            if finish:
                self._returned[number].synchronize()

    def take(self, numbers: Iterable[int]) -> None:
        """Queue the calling thread's next work after these pieces of background work."""
        if self._stream is not None:
            for number in numbers:
                torch.cuda.current_stream(self._device).wait_event(self._returned[number])
