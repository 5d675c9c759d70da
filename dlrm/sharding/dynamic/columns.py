"""Columns of a table's rows, on the host for decisions and next to the weights for all others."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostColumns:
    """Columns that are read on the host, and written there and where they live.

    On a CPU both are the same memory. To read one number from a GPU is to wait for all that is queued there,
    so the host has copies of its columns. What is written is sent behind the queued work: for saves and
    mirrors, the columns there change in the step that changes them.

    Args:
        live: by name, `[num_rows]` each.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = dict(live)
        self._on_host = {name: column.cpu() for name, column in live.items()}

    def __getitem__(self, name: str) -> Tensor:
        """A column on the host; write to it by `write` alone."""
        return self._on_host[name]

    def reload(self) -> None:
        """Read all columns again, as they were written from outside; waits for a GPU."""
        for name, column in self._live.items():
            if column is not self._on_host[name]:
                self._on_host[name].copy_(column)

    def write(self, name: str, rows: Tensor, values: Tensor | int) -> None:
        """Set the values of rows, int64 `[n]` on the host."""
        column, live = self._on_host[name], self._live[name]
        column[rows] = values if isinstance(values, int) else values.to(column.dtype)
        if live is not column:
            live[sent(rows, live.device)] = sent(column[rows], live.device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for what is queued there."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # from other memory CUDA waits first
