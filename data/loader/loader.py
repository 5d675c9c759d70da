"""The data loader of one rank: prefetches batches in the background and has an exact position."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from numbers import Integral
from typing import Any, Final

import torch

from data.batch import Batch
from data.dataset import DatasetManifest, read_manifest
from data.loader.assemble import Assembler
from data.loader.background import Feed
from data.loader.copy_ahead import CopyAhead
from data.loader.order import ORDERS, Phase, PhaseOrder, current_order
from data.loader.reader import RowReader
from data.loader.source import ParquetSource, RowGroupSource

STATE_VERSION: Final = 1
CPU: Final = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Batch size, order and prefetching of a data loader."""

    batch_size: int
    """Samples of one rank in one step."""
    window_batches: int = 64
    """Shuffle window, in batches of one rank; 1 with `shuffle=False` reads in time order."""
    shuffle: bool = True
    """Shuffle inside each window; the windows themselves stay in time order."""
    order: str = "stripes"
    """Distribution of rows over ranks, see `data.loader.order`: with `stripes` all ranks read the log
    together; with `seldp` each rank reads a chunk of its own, and the next chunk in the next epoch."""
    seed: int = 0
    """Seed of the shuffle."""
    drop_last: bool = True
    """Leave out the last samples of an epoch, fewer than one batch on every rank. False (for evaluation):
    these make one more, padded batch on every rank, with the number of real samples in `Batch.num_valid`."""
    prefetch: int = 4
    """Minimum of prefetched batches, rounded up to whole windows."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("window_batches", 1), ("prefetch", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}")
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}; choose one of {', '.join(ORDERS)}")


class DataLoader:
    """Batches of one rank from a prepared data set.

    Every rank gets the same number of batches. A new iterator, `load_state_dict` and `close` end the iterator
    before.

    Args:
        uri: folder of the data set, a local path or any pyarrow filesystem URI.
        config: batch size, order, read-ahead.
        rank: this rank, in `[0, world_size)`.
        world_size: ranks that share the samples.
        days: read only these days; default all.
        device: of the batches; those for a GPU are copied there from page-locked memory, one batch ahead.
        source: read row groups from it, e.g. a cache, instead of the files; the caller closes it.

    Raises:
        ValueError: no data set at `uri`, a day that it does not have, or fewer samples than one global batch.
    """

    def __init__(
        self,
        uri: str,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        days: Sequence[int] | None = None,
        device: torch.device = CPU,
        source: RowGroupSource | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} ranks, 0 to {world_size - 1}")
        manifest = read_manifest(uri)
        self.manifest: DatasetManifest = manifest if days is None else manifest.on_days(days)
        self.config = config
        self._uri, self._rank = uri, rank
        self._own_source = ParquetSource(uri, manifest)
        self._source = self._own_source if source is None else source
        keys = [feature.name for feature in manifest.features]
        self._shape = Phase(
            world_size=world_size,
            batch_size=config.batch_size,
            window_batches=config.window_batches,
            order=config.order,
        )
        self._epoch = 0
        self._phases = [self._shape]
        self._reading: _Reading | None = None
        self._check_size()  # before room for batches that the data could not fill
        on_gpu = device.type == "cuda"
        self._assembler = Assembler(keys, config.batch_size, pin_memory=on_gpu)
        self._copies = CopyAhead(device) if on_gpu else None

    def __len__(self) -> int:
        """Number of batches of every rank in a whole epoch."""
        return self._order(0, [self._shape]).num_steps(self.config.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the current position to the end of the epoch, then start a new epoch.

        Raises:
            OSError: a file is missing, damaged or cannot be reached.
            ValueError: a file does not fit the manifest.
            FeedClosedError: the loader was closed or restarted meanwhile.
        """
        self._stop()
        self._reading = reading = _Reading(self._new_feed())
        try:
            self._start(reading)
            while self.upcoming(1):
                reading.feed.check_open()
                self._advance()
                yield reading.ahead.popleft()
            self._epoch, self._phases = self._epoch + 1, [self._shape]
        finally:
            reading.feed.close()

    def upcoming(self, count: int) -> list[Batch]:
        """The next batches of the epoch that is being read, at most `count`; the position stays where it is.

        Waits until they are read, and raises what reading them raises.
        """
        if (reading := self._reading) is None:
            return []
        reading.ahead += islice(reading.unseen, max(0, count - len(reading.ahead)))
        return list(islice(reading.ahead, count))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank in one step."""
        return tuple(map(self._shape.size, range(self._shape.world_size)))

    def resize(self, sizes: Sequence[int]) -> None:
        """From the next batch on, let each rank have batches of its own size; all ranks call it alike.

        Batches that `upcoming` has shown will not come.

        Args:
            sizes: samples of each rank in one step, at least 1; their sum is what it was.

        Raises:
            ValueError: the sizes are not such.
        """
        shape = self._shape
        if len(sizes) != shape.world_size or min(sizes) < 1 or sum(sizes) != shape.global_batch:
            raise ValueError(
                f"batches of {list(sizes)} samples are not of {shape.world_size} ranks with at least one "
                f"sample each and {shape.global_batch} together"
            )
        self._shape = replace(shape, sizes=() if len({*sizes}) == 1 else tuple(sizes))
        self._begin_phase()
        if self._reading is not None and self._reading.feed.is_open:
            self._reading.feed.close()
            self._reading.feed = self._new_feed()
            self._start(self._reading)

    @property
    def step_samples(self) -> int:
        """Samples of all ranks in one step."""
        return self._shape.global_batch

    @property
    def epoch(self) -> int:
        """The epoch of the current position, from 0."""
        return self._epoch

    @property
    def steps_left(self) -> int:
        """Batches from the current position to the end of the epoch, equal on all ranks."""
        order = self._order(self._epoch, self._phases)
        return max(0, order.num_steps(self.config.drop_last) - self._phases[-1].steps)

    def where(self, batches_ago: int) -> str:
        """The newest batch, or one of this epoch that many before it, for messages."""
        batch = sum(phase.steps for phase in self._phases) - batches_ago
        return f"epoch {self._epoch}, batch {batch} of it"

    def state_dict(self) -> dict[str, Any]:
        """Position after the last yielded batch, equal on all ranks and ready for JSON."""
        return {
            "version": STATE_VERSION,
            "num_rows": self.manifest.num_rows,
            "parts_digest": _parts_digest(self.manifest),
            "seed": self.config.seed,
            "shuffle": self.config.shuffle,
            "sizes": list(self._shape.sizes),
            "epoch": self._epoch,
            "phases": [asdict(phase) for phase in self._phases if phase.steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, even one of another world size, batch size or order.

        Ranks keep the sizes of their batches if their number and sum are the same.

        Raises:
            ValueError: the position belongs to other data, another seed or another shuffle setting.
        """
        mine = self.state_dict()
        for name in ("version", "num_rows", "parts_digest", "seed", "shuffle"):
            if state.get(name) != mine[name]:
                raise ValueError(
                    f"this data position has {name} {state.get(name)!r}, but the loader has {mine[name]!r}: "
                    "resume with data, days, seed and shuffle of the run that saved it, or begin a new run "
                    "(dlrm.train --warm-start RUN_FOLDER: with the model of that one)"
                )
        self._stop()
        sizes = state.get("sizes", [])  # absent in positions of older versions, as in their phases
        fits = len(sizes) == self._shape.world_size and sum(sizes) == self._shape.global_batch
        self._shape = replace(self._shape, sizes=tuple(sizes) if fits else ())
        phases = [Phase(**{**phase, "sizes": tuple(phase.get("sizes", ()))}) for phase in state["phases"]]
        self._epoch, self._phases = state["epoch"], phases
        self._begin_phase()

    def close(self) -> None:
        """Stop the background thread and close the files; a waiting iterator raises FeedClosedError."""
        self._stop()
        self._own_source.close()

    def _stop(self) -> None:
        if self._reading is not None:
            self._reading.feed.close()

    def _begin_phase(self) -> None:
        """Begin a phase of the present shape, unless the last one has it."""
        if self._phases and not self._phases[-1].steps:
            self._phases.pop()
        if not (self._phases and self._phases[-1].same_shape(self._shape)):
            self._phases.append(self._shape)

    def _advance(self) -> None:
        self._phases[-1] = replace(self._phases[-1], steps=self._phases[-1].steps + 1)

    def _order(self, epoch: int, phases: Sequence[Phase]) -> PhaseOrder:
        config = self.config
        return current_order(
            self.manifest.num_rows, phases, shuffle=config.shuffle, seed=config.seed, epoch=epoch
        )

    def _start(self, reading: "_Reading") -> None:
        reading.feed.start()
        batches = chain.from_iterable(reading.feed)
        reading.ahead.clear()
        reading.unseen = iter(batches if self._copies is None else self._copies.over(batches))

    def _new_feed(self) -> Feed[list[Batch]]:
        """Windows of batches from the current position on."""
        order = self._order(self._epoch, self._phases)
        steps = range(self._phases[-1].steps, order.num_steps(self.config.drop_last))
        windows = partial(
            _windows,
            reader=RowReader(self._uri, self.manifest, self._source),
            assembler=self._assembler,
            order=order,
            steps=steps,
            rank=self._rank,
        )
        ahead = -(-self.config.prefetch // self.config.window_batches)
        return Feed(windows, ahead=ahead, name=f"data-loader-{self._rank}")

    def _check_size(self) -> None:
        rows, shape, config = self.manifest.num_rows, self._shape, self.config
        if rows == 0:
            raise ValueError(f"{self._uri} has no samples on days {list(self.manifest.days)}")
        if config.drop_last and rows < shape.global_batch:
            raise ValueError(
                f"{self._uri} has {rows} samples on days {list(self.manifest.days)}, fewer than one step of "
                f"{shape.world_size} ranks x {shape.batch_size} samples: use a smaller batch_size "
                "(of a recipe: data.global_batch_size), fewer ranks or more days (or, for evaluation, "
                "drop_last=False)"
            )


@dataclass
class _Reading:
    """What an iterator of the loader reads."""

    feed: Feed[list[Batch]]
    ahead: deque[Batch] = field(default_factory=deque)
    """Batches after the current position that `upcoming` has shown."""
    unseen: Iterator[Batch] = field(default_factory=lambda: iter(()))
    """The batches after them."""


def _windows(
    closed: Callable[[], bool],
    *,
    reader: RowReader,
    assembler: Assembler,
    order: PhaseOrder,
    steps: range,
    rank: int,
) -> Iterator[list[Batch]]:
    """Yield the batches of each window; a function, so that the thread does not keep the loader alive."""
    step = steps.start
    window = order.window(step, rank) if steps else None
    while window is not None:
        step += len(window.order) // window.batch_size
        following = order.window(step, rank) if step < steps.stop else None
        pieces = []
        for piece in reader.pieces(window.rows, window.rows[:0] if following is None else following.rows):
            if closed():
                return
            pieces.append(piece)
        yield assembler.batches(pieces, window)
        window = following


def _parts_digest(manifest: DatasetManifest) -> str:
    """Digest of the samples and their order."""
    digest = hashlib.sha256()
    for part in manifest.parts:
        digest.update(f"{part.path} {part.num_rows} {part.sha256}\n".encode())
    return digest.hexdigest()[:32]
