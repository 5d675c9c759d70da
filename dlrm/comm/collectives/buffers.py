"""Memory that collectives use again each step: first touch of fresh pages can cost more than the exchange."""

import torch
from torch import Tensor


class Buffers:
    """Tensors by name. Collectives that never run at the same time may share one."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor `[size]` of any content, which the next `take` of the same name may hand out again."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < size or (tensor.dtype, tensor.device) != (dtype, device):
            tensor = self._tensors[name] = torch.empty(size, dtype=dtype, device=device)
        return tensor[:size]
