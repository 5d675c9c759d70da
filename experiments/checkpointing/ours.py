"""The ways to save by `cpr.checkpoint` that `experiments.checkpointing` measures."""

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

POLL_S: Final = 0.002


class OurSave:
    """A full save by `cpr.checkpoint`, beside training.

    Args:
        folder: directory of the checkpointer.
        checkpointer: shared by all savers into one directory.
        moment: rolling or consistent.
        waits: begin only returns when the save is committed, as with the rivals that train no step meanwhile.
    """

    def __init__(
        self, folder: Path, checkpointer: Checkpointer, moment: Moment, *, waits: bool = False
    ) -> None:
        self.folder = folder
        self.checkpointer = checkpointer
        self._moment = moment
        self._waits = waits
        self._save: Save | None = None
        self._older: frozenset[Path] = frozenset()

    def begin(self) -> None:
        """Begin it."""
        self._older = self._manifests()
        self._save = self._begin()
        while self._waits and not (self.committed or self.idle):
            sleep(POLL_S)

    def step(self) -> None:
        """Copy the next pieces."""
        self.checkpointer.step()

    @property
    def held_up_s(self) -> float:
        """Within a step it waits for one thing: for rows that are to change to be copied before."""
        return 0.0 if self._save is None else self._save.blocked_s

    @property
    def committed(self) -> bool:
        """Whether there is a new manifest: the last thing that a save writes, and what makes it count."""
        return bool(self._manifests() - self._older)

    @property
    def idle(self) -> bool:
        """Whether older saves have been cleared away too, after the new one was read again."""
        return self._save is not None and self._save.done

    def finish(self) -> int:
        """Wait; bytes of the save."""
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
        checkpointer: has saved a base.
        rows: row ids by shard.
    """

    def __init__(self, folder: Path, checkpointer: Checkpointer, rows: Mapping[str, Tensor]) -> None:
        super().__init__(folder, checkpointer, "consistent")
        self._rows = rows

    def _begin(self) -> Save | None:
        return self.checkpointer.save_rows(self._rows)


def checkpointer_at(folder: Path, model: DistributedModelParallel, host_memory_bytes: int) -> Checkpointer:
    """Ours, into an empty directory; it never merges, which would disturb the next measurement."""
    config = CheckpointConfig(uri=str(folder), host_memory_bytes=host_memory_bytes, merge_after=0)
    return Checkpointer(model, config)


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
