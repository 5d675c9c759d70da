"""The batch of click logs that the loader yields and the trainer consumes on one rank."""

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # torchrec is untyped
    """The `B` samples of one rank in one step.

    Attributes:
        dense: float32 `[B, D]`: the `D` dense columns in manifest order, unchanged; `D` may be 0.
        sparse: ids of all features, feature-major, int64 values and lengths; `B` bags a feature. It has a
            float32 weight per id if any feature of the data set has weights (1 for the other features).
        labels: float32 `[B]`, 0 or 1.
        num_valid: number of real samples. The last `B - num_valid` are padding, so that every rank has full
            batches during evaluation; leave them out of metrics. Training batches are full.
        weight: of this rank's mean in the mean over ranks: `B` over the mean of all ranks' `B`.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    num_valid: int
    weight: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy the batch to a device."""
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            num_valid=self.num_valid,
            weight=self.weight,
        )

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked host memory, for asynchronous copies to a CUDA device."""
        return Batch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            labels=self.labels.pin_memory(),
            num_valid=self.num_valid,
            weight=self.weight,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA allocator that `stream` uses this batch."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
