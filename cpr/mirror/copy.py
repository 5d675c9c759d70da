"""The copy that a worker keeps of another one's rows: a segment of resident memory that changes in moments.

A moment is what has changed in the owner's rows since the moment before. It is received into a log next to
the copy, and counts from when it is whole there. It is written into the copy when `MOMENTS_KEPT` newer ones
have come: mirrors of several workers can be a step or two apart, and are brought to one that all have. If the
keeper dies while it writes, its successor writes the whole moment again: so the copy is always of one moment.
Until the first one is whole, the copy is not sealed, and does not count.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from cpr.checkpoint.format.tree_file import dtype_name, read_state
from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.extent import Extent
from cpr.mirror.checksums import Checksums
from cpr.mirror.pieces import NUMBERS, Piece, ShardRows, read_pieces
from cpr.resident.home import Home
from cpr.resident.regions import grow_region, map_region
from cpr.resident.segment import Segment
from cpr.shards.shard import TableShard

PASS_BYTES: Final = 16 << 20
"""Rows that are copied in one step while a mirror is filled: a few milliseconds."""
LOG_FILE: Final = "moment-"
MOMENTS_KEPT: Final = 2
"""Whole moments that are not written into the copy yet."""
STATE: Final = "state"
"""Key of the owner's other state in the replicated state of a copy, as it has arrived: decoding it would take
longer than all else that a small moment needs."""
EMPTY: Final = 0
"""Stands for the step of a copy that does not count yet."""
HEADER_BYTES: Final = 64
MAGIC: Final = int.from_bytes(b"CPRMOMT1", "little")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is known of a moment besides its rows."""

    step: int
    """Training steps done."""
    epoch: int
    """Epoch of the directory's ownership."""
    pieces_bytes: int
    state_bytes: int
    """Bytes of the owner's other state, after the pieces: a file of `cpr.checkpoint.format.tree_file`."""
    digest: tuple[int, int]
    """XXH3-128 of these bytes, as two integers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces and of the state."""
        return self.pieces_bytes + self.state_bytes

    def to_words(self) -> list[int]:
        """As integers of 64 bits, for the log and for the wire."""
        return [self.step, self.epoch, self.pieces_bytes, self.state_bytes, *self.digest]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Self:
        """Read `to_words`."""
        step, epoch, pieces_bytes, state_bytes, *digest = words
        low, high = digest
        return cls(
            step=step, epoch=epoch, pieces_bytes=pieces_bytes, state_bytes=state_bytes, digest=(low, high)
        )


def digest_of(data: Tensor) -> tuple[int, int]:
    """XXH3-128 of bytes, uint8 `[n]` on the CPU, as two signed integers of 64 bits."""
    low, high = np.frombuffer(xxhash.xxh3_128_digest(data.numpy().data), np.int64).tolist()
    return low, high


@dataclass(frozen=True, kw_only=True)
class ShardForm:
    """Extent of a shard, and its columns without their values."""

    extent: Extent
    columns: dict[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape by name."""

    @classmethod
    def of(cls, shard: TableShard, num_slots: int | None = None) -> Self:
        """The form of a live shard, or of so many slots for some of its rows, with their numbers."""
        columns = {name: (dtype_name(each), tuple(each.shape)) for name, each in shard.columns.items()}
        if num_slots is None:
            return cls(extent=shard.extent, columns=columns)
        slots = {name: (dtype, (num_slots, *shape[1:])) for name, (dtype, shape) in columns.items()}
        extent = replace(shard.extent, num_rows=num_slots)
        return cls(extent=extent, columns={**slots, NUMBERS: ("int64", (num_slots,))})


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The worker whose rows a mirror holds."""

    session_id: str
    rank: int
    world_size: int
    generation: int
    shards: tuple[ShardForm, ...]

    def to_json(self) -> str:
        """As a message."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read `to_json`.

        Raises:
            ValueError, TypeError, LookupError: the text is no owner.
        """
        raw = json.loads(text)
        return cls(**raw | {"shards": tuple(_form(each) for each in raw["shards"])})


def _form(raw: Mapping[str, Any]) -> ShardForm:
    rows, cols = raw["extent"]["table_shape"]
    columns = {str(name): (str(dtype), tuple(shape)) for name, (dtype, shape) in raw["columns"].items()}
    return ShardForm(extent=Extent(**raw["extent"] | {"table_shape": (rows, cols)}), columns=columns)


class MirrorCopy:
    """The mirror of one owner in this worker's memory.

    Raises:
        NotEnoughMemoryError: there is no room; nothing is left of it.
    """

    def __init__(self, home: Home, owner: Owner) -> None:
        self.owner = owner
        self.segment = home.create(f"mirror{owner.rank}")
        try:
            self._shards = [self._allocate(number, form) for number, form in enumerate(owner.shards)]
            self._rows = [ShardRows(shard.columns) for shard in self._shards]
            self._checksums = Checksums(self.segment.folder, self._rows, is_new=True)
            self._logs = [
                MomentLog(self.segment.folder / f"{LOG_FILE}{number}") for number in range(MOMENTS_KEPT + 1)
            ]
            num_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in self._shards)
            self._logs[0].reserve(min(num_bytes, PASS_BYTES))  # with which the copy is filled
        except NotEnoughMemoryError as error:
            self.segment.remove()
            raise NotEnoughMemoryError(
                f"{error}. Or mirror fewer rows, with mirror.rows=priority and mirror.memory"
            ) from error
        except BaseException:
            self.segment.remove()
            raise
        self._whole: list[tuple[Moment, MomentLog]] = []
        """Oldest first."""
        self._is_sealed = False

    @property
    def step(self) -> int | None:
        """Training steps done at the newest moment; None: there was no whole moment yet."""
        if self._whole:
            return self._whole[-1][0].step
        return self.segment.status.step_finished if self._is_sealed else None

    def receive(self, num_bytes: int) -> Tensor:
        """Memory for the bytes that come next, uint8 `[num_bytes]`; ends what was received before.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        return self._free_log().reserve(num_bytes)

    def put_rows(self, data: Tensor) -> None:
        """Write rows before the first moment; `data` are received pieces.

        Raises:
            ValueError: they are no pieces of the owner's shards, or come after the first moment.
        """
        if self._is_sealed:
            raise ValueError("the mirror has a whole moment, and changes in moments only")
        self._fill(list(read_pieces(data, self._rows)))

    def put(self, moment: Moment) -> None:
        """Take a moment, whose bytes were received; it counts at once.

        Raises:
            ValueError: the bytes are not those that were sent, or no pieces of the owner's shards.
            NotEnoughMemoryError: there is no room for the owner's other state.
        """
        log = self._free_log()
        data = log.data[: moment.num_bytes]
        if digest_of(data) != moment.digest:
            raise ValueError(f"the moment of step {moment.step} differs from its digest")
        pieces = list(read_pieces(data[: moment.pieces_bytes], self._rows))  # checked before it counts
        if self._is_sealed:
            if len(self._whole) == MOMENTS_KEPT:
                _, oldest = self._whole[0]
                oldest.write_into(self.segment, self._rows, self._checksums)
                self._whole.pop(0)
            log.seal(moment)
            self._whole.append((moment, log))
        else:
            self._fill(pieces)
            _write_state(moment, data, self.segment)
            self._checksums.write(EMPTY, moment.step, [])
            log.clear()
            owner = self.owner
            self.segment.seal(
                session_id=owner.session_id,
                rank=owner.rank,
                world_size=owner.world_size,
                generation=owner.generation,
                shards=self._shards,
                is_mirror=True,
            )
            self._is_sealed = True

    def remove(self) -> None:
        """Free the memory."""
        self.segment.remove()

    def _free_log(self) -> "MomentLog":
        taken = [log for _, log in self._whole]
        return next(log for log in self._logs if log not in taken)

    def _fill(self, pieces: Sequence[Piece]) -> None:
        """Write rows before the copy counts."""
        exact = [self._rows[piece.shard].exact(piece) for piece in pieces]
        self._checksums.write(EMPTY, EMPTY, exact)
        for piece in exact:
            self._rows[piece.shard].write(piece)

    def _allocate(self, number: int, form: ShardForm) -> TableShard:
        columns = {}
        for place, (name, (dtype, shape)) in enumerate(sorted(form.columns.items())):
            kind = getattr(torch, dtype)
            region = self.segment.region(f"rows-{number}-{place}", kind, torch.Size(shape).numel())
            columns[name] = region.view(shape)
        return TableShard(
            table_fqn=form.extent.table_fqn,
            table_shape=form.extent.table_shape,
            row_offset=form.extent.row_offset,
            col_offset=form.extent.col_offset,
            replicated=False,
            weights=columns.pop("weights"),
            optimizer_state=columns,
        )


class MomentLog:
    """The file of a moment that is on its way into a mirror."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def data(self) -> Tensor:
        """Bytes after the header."""
        return self._memory[HEADER_BYTES:]

    def reserve(self, num_bytes: int) -> Tensor:
        """Make room for so many bytes, uint8 `[num_bytes]`; what was there does not count any more.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        if self._memory.numel() < HEADER_BYTES + num_bytes:
            self._memory = grow_region(self._path, HEADER_BYTES + num_bytes + num_bytes // 4)
        self.clear()
        return self.data[:num_bytes]

    def seal(self, moment: Moment) -> None:
        """Let the bytes count as this moment."""
        words = self._words
        words[1:7], words[7] = moment.to_words(), 0
        words[0] = MAGIC

    def clear(self) -> None:
        """Let the bytes count no more."""
        if self._memory.numel():
            self._words[0] = 0

    @property
    def is_being_written(self) -> bool:
        """Whether writing the moment into the copy has begun."""
        return bool(self._words[7])

    def write_into(self, segment: Segment, shards: Sequence[ShardRows], checksums: Checksums) -> None:
        """Write the moment into a copy, from where on it counts there.

        If that fails, or this process dies, it can be written again.

        Raises:
            ValueError: the bytes are no pieces of these shards.
            DamagedMemoryError: the checksums are not those of the copy.
            NotEnoughMemoryError: there is no room for the owner's other state.
        """
        moment = self._moment
        data = self.data[: moment.num_bytes]
        pieces = read_pieces(data[: moment.pieces_bytes], shards)
        exact = [shards[piece.shard].exact(piece) for piece in pieces]
        if not self.is_being_written:  # else the checksums know of the rows already
            checksums.write(segment.status.step_finished, moment.step, exact)
            self._words[7] = 1
        for piece in exact:
            shards[piece.shard].write(piece)
        _write_state(moment, data, segment)
        self.clear()

    def read(self) -> tuple[Moment, Tensor] | None:
        """The moment and its bytes, of a dead worker's log; None: there is none that counts.

        Raises:
            DamagedMemoryError: the file differs from what was written.
            UnreadableMemoryError: it cannot be read now.
        """
        self._memory = map_region(self._path)
        if self._memory.numel() < HEADER_BYTES or int(self._words[0]) != MAGIC:
            return None
        moment = self._moment
        data = self.data[: max(0, moment.num_bytes)]
        if digest_of(data) != moment.digest:
            raise DamagedMemoryError(f"{self._path} differs from its digest")
        return moment, data

    @property
    def _moment(self) -> Moment:
        return Moment.from_words([int(word) for word in self._words[1:7]])

    @property
    def _words(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._memory[:HEADER_BYTES].numpy().view(np.int64)


class DeadCopy:
    """A claimed copy, whose keeper has died.

    Raises:
        DamagedMemoryError: the memory differs from what was written.
        UnreadableMemoryError: it cannot be read now.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._rows = [ShardRows(held.columns) for held in segment.held_shards()]
        self._checksums = Checksums(segment.folder, self._rows, is_new=False)
        read = [(log, log.read()) for log in map(MomentLog, segment.folder.glob(f"{LOG_FILE}*"))]
        whole = [(log, *found) for log, found in read if found is not None]
        self._whole = sorted(whole, key=lambda each: each[1].step)
        if self._whole and self._whole[0][0].is_being_written:
            self.bring_to(self._whole[0][1].step)

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps done at the moments that the copy can be brought to, newest first."""
        written = self._segment.status.step_finished
        return (*(moment.step for _, moment, _ in reversed(self._whole)), written)

    @property
    def epoch(self) -> int:
        """Epoch of the directory's ownership at the newest moment."""
        return self._whole[-1][1].epoch if self._whole else self._segment.status.epoch

    def newest_state(self) -> Any:
        """The owner's other state at the newest moment."""
        if self._whole:
            _, moment, data = self._whole[-1]
            return read_state(data[moment.pieces_bytes :].numpy().data)
        return self.state()

    def state(self) -> Any:
        """The owner's other state at the step of the rows."""
        read = self._segment.replica.read()
        assert read is not None
        return read_state(memoryview(read[1][STATE]))

    def check(self) -> None:
        """Look at all rows.

        Raises:
            DamagedMemoryError: some were overwritten by something else than the keeper.
        """
        try:
            self._checksums.check(self._segment.status.step_finished)
        except DamagedMemoryError as error:
            raise DamagedMemoryError(f"{self._segment.folder}: {error}") from error

    def bring_to(self, step: int) -> None:
        """Bring the rows to one of `steps`; newer moments stay."""
        while self._whole and self._whole[0][1].step <= step:
            log, moment, _ = self._whole[0]
            try:
                log.write_into(self._segment, self._rows, self._checksums)
            except ValueError as error:
                raise DamagedMemoryError(
                    f"the moment of step {moment.step} in {self._segment.folder} is damaged: {error}"
                ) from error
            self._whole.pop(0)


def _write_state(moment: Moment, data: Tensor, segment: Segment) -> None:
    """Write what a moment has besides its rows, into the copy; then it is of this moment."""
    segment.replica.write(moment.step, {STATE: data[moment.pieces_bytes :].numpy().tobytes()})
    segment.status.epoch = moment.epoch
    segment.status.step_finished = moment.step
    segment.status.beat()
