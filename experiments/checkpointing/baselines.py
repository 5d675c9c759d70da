"""Other ways to save, which `experiments.checkpointing` compares with `cpr.checkpoint`, and their interface.

All savers write the same tables with their optimizer state from all ranks together, and sync every file.
"""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.shards import dense_tensors, find_shards

WRITE_BYTES: Final = 64 * 2**20  # per call of raw writing, so large that calls cost nothing


class Saver:
    """A way to save; all ranks make the same calls.

    Args:
        folder: of the saved files; the caller deletes older ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> None:
        """Start a save; training waits for this call."""
        raise NotImplementedError

    def step(self) -> None:
        """Called after each training step until the save is committed and idle; training waits."""

    @property
    def held_up_s(self) -> float:
        """Seconds so far that the saver has blocked training inside a step, where callers cannot see it."""
        return 0.0

    @property
    def committed(self) -> bool:
        """Whether the save is complete and durable, as far as this rank knows; thread-safe."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether all work has ended, including the deletion of older saves."""
        return self.committed

    def finish(self) -> int:
        """Wait for the end and free memory; returns the bytes that all ranks wrote together."""
        return folder_bytes(self.folder)


class Blocking(Saver):
    """A saver that has finished when `begin` returns; `_save` writes the files of this rank."""

    _is_saved = False

    def begin(self) -> None:
        """Save on all ranks, and wait for all of them."""
        self._is_saved = False
        self._save()
        dist.barrier()
        self._is_saved = True

    @property
    def committed(self) -> bool:
        """Whether `begin` has returned."""
        return self._is_saved

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
        """Load the save into the live model."""
        load(self._state(), checkpoint_id=self.folder)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._model.fused_optimizer.state_dict()}


class DcpAsyncSave(Saver):
    """`torch.distributed.checkpoint.async_save` of the local tensors, in a thread and a group of its own.

    It gets plain tensors, views of the shards, because with torch 2.13 it fails for ShardedTensor on the CPU.
    """

    def __init__(self, folder: Path, model: DistributedModelParallel) -> None:
        super().__init__(folder)
        self._model = model
        self._group = dist.new_group(backend="gloo")  # the group of training is busy meanwhile
        self._future: Future[Any] | None = None

    def begin(self) -> None:
        """Copy the state and write it in a thread."""
        self._future = cast(
            "Future[Any]",
            async_save(local_tensors(self._model), checkpoint_id=self.folder, process_group=self._group),
        )

    @property
    def committed(self) -> bool:
        """Whether the thread has finished."""
        return self._future is not None and self._future.done()

    def finish(self) -> int:
        """Wait for the thread; returns the bytes written."""
        assert self._future is not None
        self._future.result()
        self._future = None
        return super().finish()


class TorchSave(Blocking):
    """`torch.save` of each rank's tensors to a file per rank, buffered, then fsync."""

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
    """Plain writing of the bytes of each rank's shards to a file per rank, buffered, then fsync."""

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
    """The saved state of this rank as plain tensors, by a name that is unique over all ranks."""
    tables = {
        f"{shard.name}/{name}": column.detach()
        for shard in find_shards(model)
        for name, column in shard.columns.items()
    }
    return {**tables, **{name: tensor.detach() for name, tensor in dense_tensors(model).items()}}


def files_in(folder: Path) -> list[Path]:
    """List all files under `folder`."""
    return [path for path in folder.rglob("*") if path.is_file()]


def folder_bytes(folder: Path) -> int:
    """Total size of the files under `folder`."""
    return sum(path.stat().st_size for path in files_in(folder))


def forget_cached(folder: Path) -> None:
    """Drop the files under `folder`, which must be synced, from the page cache."""
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
