"""The savers of `cpr.checkpoint` that `experiments.checkpointing` measures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Final

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.save.writer_thread import Save
from cpr.shards.shard import TableShard
from experiments.checkpointing.baselines import Saver

POLL_S: Final = 0.002


class OurSave(Saver):
    """A full save by `cpr.checkpoint` in the background of training.

    Args:
        folder: directory of the checkpointer.
        checkpointer: shared by all savers with the same directory.
        moment: rolling or consistent.
        waits: whether `begin` waits for the commit, so that no step is trained meanwhile.
    """

    def __init__(
        self, folder: Path, checkpointer: Checkpointer, moment: Moment, *, waits: bool = False
    ) -> None:
        super().__init__(folder)
        self.checkpointer = checkpointer
        self._moment = moment
        self._waits = waits
        self._save: Save | None = None
        self._older: frozenset[Path] = frozenset()

    def begin(self) -> None:
        """Start the save."""
        self._older = self._manifests()
        self._save = self._begin()
        while self._waits and not (self.committed or self.idle):
            sleep(POLL_S)

    def step(self) -> None:
        """Copy the next pieces of a rolling save."""
        self.checkpointer.step()

    @property
    def held_up_s(self) -> float:
        """Seconds that steps have waited for the copy of rows before their update."""
        return 0.0 if self._save is None else self._save.blocked_s

    @property
    def committed(self) -> bool:
        """Whether a new manifest exists, the file that a save writes last and that makes it valid."""
        return bool(self._manifests() - self._older)

    @property
    def idle(self) -> bool:
        """Whether the new save is verified and older saves are deleted."""
        return self._save is not None and self._save.done

    def finish(self) -> int:
        """Wait for the save; returns its bytes."""
        self.checkpointer.wait()
        assert self._save is not None
        assert self._save.manifest is not None
        return self._save.manifest.num_bytes

    def _begin(self) -> Save | None:
        return self.checkpointer.save(self._moment)

    def _manifests(self) -> frozenset[Path]:
        return frozenset(self.folder.glob("saves/*/manifest.json"))


class OurRowSave(OurSave):
    """A row save by `cpr.checkpoint`.

    Args:
        folder: directory of the checkpointer.
        checkpointer: has written a full save.
        rows: row ids by shard.
    """

    def __init__(self, folder: Path, checkpointer: Checkpointer, rows: Mapping[str, Tensor]) -> None:
        super().__init__(folder, checkpointer, "consistent")
        self._rows = rows

    def _begin(self) -> Save | None:
        return self.checkpointer.save_rows(self._rows)


def checkpointer_at(folder: Path, model: DistributedModelParallel, host_memory_bytes: int) -> Checkpointer:
    """A checkpointer for an empty directory, without compaction, which would disturb the next measurement."""
    config = CheckpointConfig(uri=str(folder), host_memory_bytes=host_memory_bytes, merge_after=0)
    return Checkpointer(model, config)


def shard_bytes(shards: Sequence[TableShard]) -> int:
    """Size of all rows with their optimizer state."""
    return sum(shard.num_rows * shard.bytes_per_row for shard in shards)


def random_rows(shards: Sequence[TableShard], share: float, seed: int) -> dict[str, Tensor]:
    """Ascending ids of a random `share` of the rows of each shard, by the shard's name."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for shard in shards:
        drawn = torch.randperm(shard.num_rows, generator=generator)[: int(shard.num_rows * share)]
        rows[shard.name] = drawn.sort().values + shard.row_offset
    return rows
