"""The order between a training loop's work on a GPU and that of a thread beside it; on the CPU there is none.

Work on a GPU is only queued when a call returns. What one thread hands to another must therefore come with an
event, for the other's stream to wait for.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch


class SideStream:
    """A stream of its own for the thread beside; each side waits for what it takes from the other.

    Args:
        device: on which both work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._given: dict[int, torch.cuda.Event] = {}
        self._returned: dict[int, torch.cuda.Event] = {}

    def give(self, key: int, finish: bool) -> None:
        """What the calling thread has queued up to now makes something ready.

        Args:
            key: of that.
            finish: wait here until it is, so that somebody can take the time.
        """
        if self._stream is not None:
            self._given[key] = torch.cuda.current_stream(self._device).record_event()
            if finish:
                self._given[key].synchronize()

    @contextlib.contextmanager
    def beside(self, keys: Iterable[int], number: int, finish: bool) -> Iterator[None]:
        """Work that goes on beside, when what was given is ready.

        Args:
            keys: of what was given.
            number: under which `take` will know this work.
            finish: wait here until it is done.
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
        """What the calling thread queues from now on comes after these pieces of work."""
        if self._stream is not None:
            for number in numbers:
                torch.cuda.current_stream(self._device).wait_event(self._returned[number])
