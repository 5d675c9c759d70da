"""The data loader of a stream: batches of what has come to each rank, with an exact position."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from data.batch import Batch
from data.dataset import DatasetManifest
from data.loader.assemble import Assembler
from data.loader.background import FeedClosedError
from data.loader.columns import Column, Rows
from data.loader.loader import LoaderConfig
from data.loader.order import Window
from data.stream.agreement import PartitionState, Rules, decide, limits
from data.stream.injection import Injection
from data.stream.reader import PartitionReader, ReaderConfig
from data.stream.sharing import Share
from data.stream.source import Known, StreamSource
from data.stream.units import KnownUnits

logger = logging.getLogger(__name__)

STATE_VERSION: Final = 1
AHEAD_STEPS: Final = 2
"""Global batches that a rank reads ahead: it may have to train all records of a step."""
WAITS_S: Final = (0.002, 0.05)
"""Pauses between attempts to agree on a step, the first and the longest; each is twice the one before."""
QUIET_S: Final = 60.0
"""Seconds without a step after which that is logged."""


@dataclass(frozen=True, kw_only=True)
class StreamFigures:
    """How a stream was doing before a step, over all ranks."""

    waiting: int
    """Records that have come and were not trained."""
    lag_s: float
    """Age of the oldest record of the step."""
    trained: int
    """Records so far."""
    left_out: int
    """Records that the limit on waiting ones has left out, or that have gone or come late."""
    bad: int
    """Records that could not be read."""


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """A step that all ranks will train."""

    batch: Batch
    num_samples: int
    states: dict[str, PartitionState]
    waiting: int
    lag_s: float


class StreamLoader:
    """Batches of one rank from a stream; has the methods of `data.loader.DataLoader`, and one endless epoch.

    A step has `rules.global_batch` records over all ranks, or fewer if no more come in time.
    Each record has the weight that it would have in a full step. A rank to which nothing has come gets a
    batch of one sample without ids, which has no weight.

    Args:
        source: the stream; closed with the loader.
        manifest: columns of the records, and their tables.
        config: of which the batch size counts, the mean of all ranks.
        rules: when a step begins, and when the stream ends.
        backlog: records of one rank that may wait; 0: any number.
        policy: what is kept if more wait, one of `data.stream.backlog.POLICIES`.
        rank: this rank.
        world_size: number of ranks.
        share: exchanges the offers of ranks.
        injection: deals records among ranks; None: each trains those that have come to it.

    Raises:
        ValueError: there are more ranks than partitions.
    """

    def __init__(
        self,
        source: StreamSource,
        manifest: DatasetManifest,
        config: LoaderConfig,
        rules: Rules,
        *,
        backlog: int = 0,
        policy: str = "newest",
        rank: int = 0,
        world_size: int = 1,
        share: Share = lambda offer: [offer],
        injection: Injection | None = None,
    ) -> None:
        if world_size > len(source.partitions):
            raise ValueError(
                f"the stream has {len(source.partitions)} partitions, and each of {world_size} ranks reads "
                "some of its own: start fewer ranks, or give the topic more partitions"
            )
        self.manifest, self.config = manifest, config
        self.while_waiting: Callable[[], None] = lambda: None
        """Called again and again, on all ranks together, while nothing comes; may raise to stop."""
        self._source, self._rules, self._share, self._injection = source, rules, share, injection
        self._rank, self._world_size = rank, world_size
        self._reading = ReaderConfig(
            ahead=AHEAD_STEPS * rules.global_batch,
            chunk=rules.global_batch,
            backlog=backlog,
            policy=policy,
            seed=config.seed,
        )
        self._states = {name: PartitionState() for name in source.partitions}
        self._known = {name: KnownUnits() for name in source.partitions}
        self._late = 0
        """Records of units that came late."""
        self._assembler = Assembler(
            [feature.name for feature in manifest.features], config.batch_size, pin_memory=False
        )
        self._reader: PartitionReader | None = None
        self._agreed: deque[_Agreed] = deque()
        self._limits = [0] * world_size
        self._is_over = False
        self._at_end: dict[str, PartitionState] = {}
        """States after the last batch, with what was left out behind it."""
        self._last: _Agreed | None = None

    def __len__(self) -> int:
        """Raises, as nobody knows.

        Raises:
            TypeError: always.
        """
        raise TypeError("a stream has no length")

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches as records come, to the end of the stream.

        Raises:
            ValueError: the stream is not what the manifest describes, or has ended with bad records alone.
            FeedClosedError: the loader was closed.
        """
        self._restart()
        quiet_since = time.monotonic()
        while True:
            pause_s, longest_s = WAITS_S
            while not (self._agreed or self._is_over or self._agree()):
                self.while_waiting()
                if time.monotonic() - quiet_since >= QUIET_S:
                    quiet_since = time.monotonic()
                    if self._rank == 0:
                        logger.info("no records have come for a step for %.0f s: waiting", QUIET_S)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            if not self._agreed:
                self._states |= self._at_end
                self._check_trained()
                return
            self._last = agreed = self._agreed.popleft()
            self._states.update(agreed.states)
            yield agreed.batch
            quiet_since = time.monotonic()

    def upcoming(self, count: int) -> list[Batch]:
        """The next batches, at most `count`, whose records have come; all ranks call it alike."""
        while len(self._agreed) < count and not self._is_over and self._agree():
            pass
        return [agreed.batch for agreed in list(self._agreed)[:count]]

    @property
    def epoch(self) -> int:
        """1 at the end of the stream, else 0."""
        return int(self._is_over and not self._agreed)

    @property
    def steps_left(self) -> int:
        """0 at the end of the stream, else 1 or more."""
        return 1 - self.epoch

    @property
    def step_samples(self) -> int:
        """Samples of all ranks in the step of the newest batch."""
        return 0 if self._last is None else self._last.num_samples

    @property
    def figures(self) -> StreamFigures | None:
        """How the stream was doing before the newest batch, or is at its end; None before both."""
        last = self._last
        if last is None and not self.epoch:
            return None
        states = self._states.values()
        return StreamFigures(
            waiting=0 if last is None or self.epoch else last.waiting,
            lag_s=0.0 if last is None or self.epoch else last.lag_s,
            trained=sum(each.trained for each in states),
            left_out=self._late + sum(each.left_out for each in states),
            bad=sum(each.bad for each in states),
        )

    def where(self, batches_ago: int) -> str:
        """Place of the newest batch, for messages."""
        return f"after {sum(each.trained for each in self._states.values()):,} records of the stream"

    def state_dict(self) -> dict[str, Any]:
        """Position after the last yielded batch, equal on all ranks: plain values, and units as bytes."""
        states = sorted(self._states.items())
        known = {name: self._known[name].encoded(state.place) for name, state in states}
        return {
            "version": STATE_VERSION,
            "stream": self._source.identity,
            "partitions": {name: state.to_json() for name, state in states},
            "known": {name: encoded for name, encoded in known.items() if encoded},
            "late": self._late,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, also one of another world size or batch size.

        Raises:
            ValueError: the position belongs to another stream, or to partitions that are gone.
        """
        known = {"version": STATE_VERSION, "stream": self._source.identity}
        for name, mine in known.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"this data position has {name} {state.get(name)!r}, but the loader has {mine!r}: resume "
                    "with the stream of the run that saved it, or begin a new run (dlrm.train --warm-start "
                    "RUN_FOLDER: with the model of that one)"
                )
        if gone := sorted({*state["partitions"]} - {*self._source.partitions}):
            raise ValueError(f"the stream has no partition {gone[0]} any more, which the saved position has")
        self._stop()
        saved = {name: PartitionState.from_json(each) for name, each in state["partitions"].items()}
        self._states = {name: saved.get(name, PartitionState()) for name in self._source.partitions}
        self._late = state.get("late", 0)
        if "known" in state:
            self._known = {name: KnownUnits() for name in self._source.partitions}
            self._known |= {name: KnownUnits.decoded(each) for name, each in state["known"].items()}
        else:  # of an earlier version: what is older than the place counts as read
            since = {name: each.place.unit for name, each in self._states.items()}
            self._known = {name: KnownUnits(Known(since=unit)) for name, unit in since.items()}
        self._is_over = False

    def close(self) -> None:
        """Stop the background thread and close the stream."""
        self._stop()
        self._source.close()

    def _restart(self) -> None:
        """Read on from the position, and forget what was agreed on."""
        self._stop()
        self._limits = [0] * self._world_size
        own = self._source.partitions[self._rank :: self._world_size]
        states = {name: self._states[name] for name in own}
        known = {name: self._known[name].known for name in own}
        self._reader = PartitionReader(self._source, states, self._reading, known)
        self._reader.start()

    def _check_trained(self) -> None:
        """Refuse to end as if all were well when all records of a stream, if any, were bad."""
        figures = self.figures
        assert figures is not None, "this is the end"
        if figures.bad and not figures.trained:
            raise ValueError(
                f"the stream has ended, and none of its records was trained: {figures.bad:,} cannot be, and "
                "the log says why. Is this the stream that the data set of data.uri describes?"
            )

    def _stop(self) -> None:
        self._agreed.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _agree(self) -> bool:
        """Agree with all ranks whether one more step can be trained; if so it is the next one."""
        if self._reader is None:
            raise FeedClosedError("the loader of the stream was closed while it was in use")
        offers = self._share(self._reader.offer(self._limits[self._rank]))
        decision = decide(offers, self._rules)
        self._limits = limits(offers, self._rules.global_batch)
        self._is_over = decision == "end"
        states: dict[str, PartitionState] = {}
        for offer in offers:
            states |= offer.states
            for name, units in offer.found.items():
                self._known[name].add(units)
                self._late += sum(each.num_records for each in units if each.is_late)
        if self._is_over:  # batches that were agreed on before may still have to be trained
            self._at_end = states
        if decision != "train":
            return False
        pieces = self._reader.take(offers[self._rank].size)
        if self._injection is not None:
            pieces = self._injection.deal(pieces, self._world_size)
        self._agreed.append(
            _Agreed(
                batch=self._batch(pieces),
                num_samples=sum(offer.size for offer in offers),
                states=states,
                waiting=sum(offer.waiting for offer in offers),
                lag_s=max(offer.lag_s for offer in offers),
            )
        )
        return True

    def _batch(self, pieces: Sequence[Rows]) -> Batch:
        size = sum(len(piece.label) for piece in pieces)
        order = np.arange(max(size, 1))
        window = Window(rows=order, order=order, batch_size=len(order), num_valid=size)
        batch = self._assembler.batches(pieces or [self._no_rows()], window)[0]
        if not size:
            batch.weight = 0.0
        return batch

    def _no_rows(self) -> Rows:
        """A sample without ids, for a rank that has none: exchanges need as many batches on all ranks."""
        none, offsets = np.empty(0, np.int64), np.zeros(2, np.int64)
        features = self.manifest.features
        return Rows(
            label=Column(np.zeros(1, np.float32)),
            dense=tuple(Column(np.zeros(1, np.float32)) for _ in self.manifest.dense),
            ids=tuple(Column(none, offsets) for _ in features),
            weights=tuple(
                Column(none.astype(np.float32), offsets) if feature.weights else None for feature in features
            ),
        )
