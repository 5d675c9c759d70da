"""The ways to save and load that `experiments.checkpointing` compares: PyTorch's, plain writing, and ours.

All write the same tables with their optimizer state from all ranks together; every file is synced.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.saver import Save
from cpr.shards import dense_tensors, find_shards
from cpr.shards.shard import TableShard

WRITE_BYTES: Final = 64 * 2**20  # raw writing: at once, enough that calls cost nothing


class Saver(Protocol):
    """One way to save. All ranks make the same calls."""

    def begin(self) -> None:
        """Begin a save; training waits as long as this takes."""

    def step(self) -> None:
        """Called after each training step while the save is under way; training waits."""

    @property
    def committed(self) -> bool:
        """Whether the save is complete and durable, as far as this rank knows; any thread may ask."""

    def finish(self) -> int:
        """Wait for the end, free what the save held; bytes that all ranks wrote together."""


class Blocking:
    """A save that is over when `begin` is: its own work, then a barrier.

    Args:
        folder: where it writes; emptied of an older save by nobody but its owner.
    """

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


class OurSave:
    """A full save by `cpr.checkpoint`, beside training.

    Args:
        checkpointer: shared by all savers into one directory.
        moment: rolling or consistent.
        waits: begin only returns when the save is committed, as with the rivals that train no step meanwhile.
    """

    def __init__(self, checkpointer: Checkpointer, moment: Any, *, waits: bool = False) -> None:
        self.checkpointer = checkpointer
        self._moment = moment
        self._waits = waits
        self._save: Save | None = None

    def begin(self) -> None:
        """Begin it."""
        self._save = self._begin()
        if self._waits:
            self.checkpointer.wait()

    def step(self) -> None:
        """Copy the next pieces."""
        self.checkpointer.step()

    @property
    def committed(self) -> bool:
        """Whether it is committed."""
        return self._save is not None and self._save.done

    def finish(self) -> int:
        """Wait; bytes of the save."""
        self.checkpointer.wait()
        assert self._save is not None
        assert self._save.manifest is not None
        return self._save.manifest.num_bytes

    def _begin(self) -> Save | None:
        return self.checkpointer.save(self._moment)


class OurRowSave(OurSave):
    """A row save by `cpr.checkpoint`.

    Args:
        checkpointer: has saved a base.
        rows: row ids by shard.
    """

    def __init__(self, checkpointer: Checkpointer, rows: Mapping[str, Tensor]) -> None:
        super().__init__(checkpointer, "consistent")
        self._rows = rows

    def _begin(self) -> Save | None:
        return self.checkpointer.save_rows(self._rows)


def checkpointer_at(folder: Path, model: DistributedModelParallel, host_memory_bytes: int) -> Checkpointer:
    """Ours, into an empty directory; it never merges, which would disturb the next measurement."""
    config = CheckpointConfig(uri=str(folder), host_memory_bytes=host_memory_bytes, merge_after=0)
    return Checkpointer(model, config)


def local_tensors(model: DistributedModelParallel) -> dict[str, Tensor]:
    """All that is saved on this rank as plain tensors, by a name that is unique over all ranks."""
    tables = {
        f"{shard.name}/{name}": column.detach()
        for shard in find_shards(model)
        for name, column in shard.columns.items()
    }
    return {**tables, **{name: tensor.detach() for name, tensor in dense_tensors(model).items()}}


def shard_bytes(shards: Sequence[TableShard]) -> int:
    """Of the rows with their optimizer state."""
    return sum(shard.num_rows * shard.bytes_per_row for shard in shards)


def random_rows(shards: Sequence[TableShard], share: float, seed: int) -> dict[str, Tensor]:
    """`share` of the rows of each shard, drawn at random, ascending, by the shard's name."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for shard in shards:
        drawn = torch.randperm(shard.num_rows, generator=generator)[: int(shard.num_rows * share)]
        rows[shard.name] = drawn.sort().values + shard.row_offset
    return rows


def files_in(folder: Path) -> list[Path]:
    """All files under `folder`."""
    return [path for path in folder.rglob("*") if path.is_file()]


def folder_bytes(folder: Path) -> int:
    """Of all files under `folder`."""
    return sum(path.stat().st_size for path in files_in(folder))


def forget_cached(folder: Path) -> None:
    """Drop the files under `folder`, which are synced, from the page cache."""
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
