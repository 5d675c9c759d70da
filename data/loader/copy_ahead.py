"""Copies of batches to a GPU, made while it computes on the batch before."""

from collections.abc import Iterable, Iterator

import torch

from data.batch import Batch


class CopyAhead:
    """Copies batches in page-locked memory to a GPU on a stream of its own, one batch ahead of their use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches on the GPU, for use on the current stream; the host waits for no copy."""
        ahead: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            ready, ahead = ahead, self._begin(batch)
            if ready is not None:
                yield self._finish(*ready)
        if ahead is not None:
            yield self._finish(*ahead)

    def _begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device, non_blocking=True)
            return copied, self._stream.record_event()

    def _finish(self, batch: Batch, copied: torch.cuda.Event) -> Batch:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        batch.record_stream(current)  # its memory is that of the other stream, which must not reuse it early
        return batch
