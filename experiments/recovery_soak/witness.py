"""An independent log of every row after each step, written without the code that saves and recovers.

Each worker appends to a log of its own, on disk, outside of resident memory and checkpoints: before a step
the ids of its batch, after the step a digest of every row that has changed, with its optimizer state.
Restarted workers begin new logs: at a step, the newest log that begins there or before holds for a shard.
`experiments.recovery_soak.verdict` compares rows with these logs.

A log is a line of JSON, then records of three int64 (what, step, count) and two arrays of that many entries.
"""

import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch

from cpr.extent import Extent
from cpr.shards.shard import TableShard

ROWS: Final = 0
"""A record of rows: places (uint32) among all rows of the log, digests (uint64)."""
BATCH: Final = 1
"""A record of a batch: tables (uint32) by number, ids (uint64)."""

Digests = np.ndarray[Any, np.dtype[np.uint64]]
Places = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, kw_only=True)
class ShardKey(Extent):
    """The rows and columns of a table that a shard has, and the tensors kept for each row."""

    columns: dict[str, tuple[str, int]] = field(hash=False)
    """By name: dtype, and number of values in a row, 0 for a one-dimensional column."""

    @classmethod
    def of(cls, shard: TableShard) -> "ShardKey":
        """The key of a live shard."""
        return cls(
            **asdict(shard.extent),
            columns={
                name: (str(tensor.dtype).removeprefix("torch."), tensor.shape[1] if tensor.dim() == 2 else 0)
                for name, tensor in shard.columns.items()
            },
        )

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "ShardKey":
        """The key that a log stores."""
        columns = {name: (dtype, width) for name, (dtype, width) in stored["columns"].items()}
        return cls(**stored | {"table_shape": tuple(stored["table_shape"]), "columns": columns})

    def empty(self, counters: Sequence[str]) -> TableShard:
        """An uninitialised shard with this key, to load a save into."""
        columns = {
            name: torch.empty((self.num_rows, width)[: 2 if width else 1], dtype=getattr(torch, dtype))
            for name, (dtype, width) in self.columns.items()
        }
        return TableShard(
            table_fqn=self.table_fqn,
            table_shape=self.table_shape,
            row_offset=self.row_offset,
            col_offset=self.col_offset,
            replicated=False,
            weights=columns.pop("weights"),
            optimizer_state=columns,
            counters={name: torch.zeros((), dtype=torch.float64) for name in counters},
        )


def row_digests(shard: TableShard) -> Digests:
    """Compute a digest of each row's weights and optimizer state, uint64 `[num_rows]`."""
    shard.flush()
    total = np.zeros(shard.num_rows, np.uint64)
    for name, tensor in sorted(shard.columns.items()):
        content = tensor.detach().cpu().reshape(shard.num_rows, -1).contiguous().view(torch.uint8).numpy()
        words = content.view(np.uint64 if content.shape[1] % 8 == 0 else np.uint32).astype(np.uint64)
        words ^= words >> np.uint64(29)
        total += ((words + np.uint64(1)) * _factors(name, words.shape[1])).sum(axis=1, dtype=np.uint64)
    return total


@cache
def _factors(name: str, count: int) -> Digests:
    """Random odd factors: with these, a change of a single word always changes the digest."""
    random = np.random.default_rng(crc32(name.encode()))
    return random.integers(0, 2**63, count, np.uint64) * np.uint64(2) + np.uint64(1)


class Writer:
    """Appends to the log of one worker.

    Args:
        folder: of all logs.
        step: number of the last finished step.
        shards: of this worker.
    """

    def __init__(self, folder: Path, step: int, shards: Sequence[TableShard]) -> None:
        self._shards = list(shards)
        self._file = os.open(
            folder / f"{time.time_ns()}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        )
        head = {"shards": [asdict(ShardKey.of(shard)) for shard in shards]}
        self._digests = self._now()
        places = np.arange(len(self._digests), dtype=np.uint32)
        self._write(ROWS, step, places, self._digests, json.dumps(head).encode() + b"\n")

    def batch(self, step: int, features: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
        """Log the ids that the step will train on, by feature, which is the last part of its table's name."""
        names = sorted(features)
        numbers = [np.full(len(features[name]), crc32(name.encode()), np.uint32) for name in names]
        ids = [features[name].astype(np.uint64) for name in names]
        self._write(BATCH, step, np.concatenate(numbers), np.concatenate(ids))

    def rows(self, step: int) -> None:
        """Log the rows that a finished step has changed."""
        now = self._now()
        changed = np.flatnonzero(now != self._digests).astype(np.uint32)
        self._write(ROWS, step, changed, now[changed])
        self._digests = now

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _now(self) -> Digests:
        return np.concatenate([row_digests(shard) for shard in self._shards] or [np.zeros(0, np.uint64)])

    def _write(self, what: int, step: int, first: Places, second: Digests, head: bytes = b"") -> None:
        record = np.array([what, step, len(first)], np.int64)
        os.write(self._file, head + record.tobytes() + first.tobytes() + second.tobytes())


class Log:
    """The log of a worker; a last record that was cut off by a kill does not count.

    It is mapped and not read: the logs of a long run are larger than a machine's memory.
    """

    def __init__(self, path: Path) -> None:
        self.shards: dict[str, ShardKey] = {}
        self._starts: dict[str, int] = {}
        self._records: list[tuple[int, int, int, int]] = []
        """Kind, step, count, and offset of the arrays."""
        if not path.stat().st_size:
            return
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        head = self._content.readline()
        if not head.endswith(b"\n"):
            return
        start = 0
        for stored in json.loads(head)["shards"]:
            key = ShardKey.from_dict(stored)
            self.shards[key.name], self._starts[key.name] = key, start
            start += key.num_rows
        self._num_rows = start
        self._find_records(len(head))

    @property
    def is_whole(self) -> bool:
        """Whether the log has its first record."""
        return bool(self._records)

    @cached_property
    def has_trained(self) -> bool:
        """Whether the log has a batch."""
        return any(what == BATCH for what, _, _, _ in self._records)

    @property
    def begin(self) -> int:
        """The step at which the log begins."""
        return self._records[0][1]

    @cached_property
    def last(self) -> int:
        """The last finished step in the log."""
        return max(step for what, step, _, _ in self._records if what == ROWS)

    def digests(self, name: str, step: int) -> Digests:
        """Digests of the rows of a shard after a step from `begin` to `last`."""
        found = np.zeros(self._num_rows, np.uint64)
        for what, at, count, offset in self._records:
            if what == ROWS and at <= step:
                places, digests = self._arrays(count, offset)
                found[places] = digests
        start = self._starts[name]
        return found[start : start + self.shards[name].num_rows]

    def batch(self, step: int) -> dict[int, "np.ndarray[Any, Any]"]:
        """Ids of the last batch, by the CRC of the feature's name; empty if it belongs to another step."""
        batches = [record for record in self._records if record[0] == BATCH]
        if not batches or batches[-1][1] != step:
            return {}
        features, ids = self._arrays(*batches[-1][2:])
        return {int(feature): ids[features == feature] for feature in np.unique(features)}

    def _find_records(self, offset: int) -> None:
        while offset + 24 <= len(self._content):
            what, step, count = map(int, np.frombuffer(self._content, np.int64, 3, offset))
            end = offset + 24 + count * 12
            if end > len(self._content):
                return
            self._records.append((what, step, count, offset + 24))
            offset = end

    def _arrays(self, count: int, offset: int) -> tuple[Places, Digests]:
        first = np.frombuffer(self._content, np.uint32, count, offset)
        return first, np.frombuffer(self._content, np.uint64, count, offset + 4 * count)


class History:
    """All logs of a run, oldest first.

    Args:
        folder: of the logs.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.log"), key=lambda path: int(path.stem.split("-")[0]))
        self.logs = [log for path in paths if (log := Log(path)).is_whole]

    @property
    def shards(self) -> dict[str, ShardKey]:
        """Every shard in any log, by name."""
        return {name: key for log in self.logs for name, key in log.shards.items()}

    @property
    def last_steps(self) -> tuple[int, int]:
        """The last step that all workers finished, and the last that any did; there must be logs."""
        lasts = [max(log.last for log in self._newest(name, None)) for name in self.shards]
        return min(lasts), max(lasts)

    def digests(self, name: str, step: int) -> Digests | None:
        """Digests of the rows of a shard after a step, by the newest logs; None if no log has that step."""
        found = [log for log in self._newest(name, step) if log.last >= step]
        return found[-1].digests(name, step) if found else None

    def batch(self, key: ShardKey, step: int) -> "np.ndarray[Any, Any]":
        """Return the distinct ids that a step looked up in a table; none unless it is the last one logged."""
        feature = crc32(key.table_fqn.rpartition(".")[2].encode())
        parts = [ids for log in self._trained_last if (ids := log.batch(step).get(feature)) is not None]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)

    @cached_property
    def _trained_last(self) -> list[Log]:
        """For each shard the newest log with a batch: later workers may have died before their first."""
        newest = {name: log for log in self.logs if log.has_trained for name in log.shards}
        return list({id(log): log for log in newest.values()}.values())

    def _newest(self, name: str, step: int | None) -> list[Log]:
        """The newest logs of a shard: several if workers that began together have copies of it."""
        found = [log for log in self.logs if name in log.shards and (step is None or log.begin <= step)]
        return [log for log in found if log.begin == found[-1].begin]
