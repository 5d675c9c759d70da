"""What `experiments.checkpointing` measures `cpr.checkpoint` against, and what all savers have in common.

All write the same tables with their optimizer state from all ranks together, and sync every file.
"""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.shards import dense_tensors, find_shards
from experiments.checkpointing.files import folder_bytes

WRITE_BYTES: Final = 64 * 2**20  # raw writing: at once, enough that calls cost nothing


class Saver(Protocol):
    """One way to save. All ranks make the same calls."""

    def begin(self) -> None:
        """Begin a save; training waits as long as this takes."""

    def step(self) -> None:
        """Called after each training step while the save is under way; training waits."""

    @property
    def held_up_s(self) -> float:
        """Seconds, so far, that it has made training wait within a step, so that no caller sees it."""

    @property
    def committed(self) -> bool:
        """Whether the save is complete and durable, as far as this rank knows; any thread may ask."""

    @property
    def idle(self) -> bool:
        """Whether nothing goes on any more, not even clearing away what the save has made superfluous."""

    def finish(self) -> int:
        """Wait for the end, free what the save held; bytes that all ranks wrote together."""


class Blocking:
    """A save that is over when `begin` is: its own work, then a barrier.

    Args:
        folder: where it writes; emptied of an older save by nobody but its owner.
    """

    held_up_s = 0.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.committed = False

    def begin(self) -> None:
        """Save, on all ranks."""
        self.committed = False
        self._save()
        dist.barrier()
        self.committed = True

    def step(self) -> None:
        """Nothing is left to do."""

    @property
    def idle(self) -> bool:
        """It ends with the commit."""
        return self.committed

    def finish(self) -> int:
        """Bytes written."""
        return folder_bytes(self.folder)

    def _save(self) -> None:
        raise NotImplementedError


class DcpSave(Blocking):
    """`torch.distributed.checkpoint.save` of TorchRec's sharded state with the tables' optimizer."""

    def __init__(self, folder: Path, model: DistributedModelParallel) -> None:
        super().__init__(folder)
        self._model = model

    def _save(self) -> None:
        save(self._state(), checkpoint_id=self.folder)

    def load(self) -> None:
        """Load what was saved into the live model."""
        load(self._state(), checkpoint_id=self.folder)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._model.fused_optimizer.state_dict()}


class DcpAsyncSave:
    """`torch.distributed.checkpoint.async_save` of the local tensors, in a thread and a group of its own.

    ShardedTensor fails in it on the CPU with torch 2.13, so that it gets plain tensors: the views that
    PyTorch's users would take of their shards.
    """

    held_up_s = 0.0

    def __init__(self, folder: Path, model: DistributedModelParallel) -> None:
        self.folder = folder
        self._model = model
        self._group = dist.new_group(backend="gloo")  # training's own group is busy meanwhile
        self._future: Future[Any] | None = None

    def begin(self) -> None:
        """Copy the state; writing goes on in a thread."""
        self._future = cast(
            "Future[Any]",
            async_save(local_tensors(self._model), checkpoint_id=self.folder, process_group=self._group),
        )

    def step(self) -> None:
        """Training does not take part."""

    @property
    def committed(self) -> bool:
        """Whether the thread is done."""
        return self._future is not None and self._future.done()

    @property
    def idle(self) -> bool:
        """It ends with the commit."""
        return self.committed

    def finish(self) -> int:
        """Wait for the thread; bytes written."""
        assert self._future is not None
        self._future.result()
        self._future = None
        return folder_bytes(self.folder)


class TorchSave(Blocking):
    """`torch.save` of each rank's tensors to a file of its own, buffered, then fsync."""

    def __init__(self, folder: Path, model: DistributedModelParallel) -> None:
        super().__init__(folder)
        self._model = model

    def _save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"rank{dist.get_rank()}.pt").open("wb") as file:
            torch.save(local_tensors(self._model), file)
            file.flush()
            os.fsync(file.fileno())


class RawWrite(Blocking):
    """The bytes of each rank's shards as they lie in memory, to one file, buffered, then fsync."""

    def __init__(self, folder: Path, model: DistributedModelParallel) -> None:
        super().__init__(folder)
        self._shards = find_shards(model)

    def _save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"rank{dist.get_rank()}.bin").open("wb", buffering=0) as file:
            for shard in self._shards:
                for column in shard.columns.values():
                    data = memoryview(column.detach().view(-1).view(torch.uint8).numpy().data)
                    for start in range(0, len(data), WRITE_BYTES):
                        file.write(data[start : start + WRITE_BYTES])
            os.fsync(file.fileno())


def local_tensors(model: DistributedModelParallel) -> dict[str, Tensor]:
    """All that is saved on this rank as plain tensors, by a name that is unique over all ranks."""
    tables = {
        f"{shard.name}/{name}": column.detach()
        for shard in find_shards(model)
        for name, column in shard.columns.items()
    }
    return {**tables, **{name: tensor.detach() for name, tensor in dense_tensors(model).items()}}
