"""Reads the partitions of one rank ahead, in a background thread, and offers their records in order."""

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data.loader.background import Background
from data.loader.columns import Rows
from data.stream.agreement import Offer, PartitionState
from data.stream.backlog import POLICIES, after, chosen, num_kept, shares_of
from data.stream.source import Fetched, FoundUnit, Known, Place, StreamSource

logger = logging.getLogger(__name__)

_DIGITS: Final = re.compile(r"[\d.,]*\d")

POLL_S: Final = 0.05
"""Pause of the thread when nothing has come; when enough is read, until some of it is taken."""
CLOSE_S: Final = 5.0
BAD_SHARE: Final = 0.1
"""More bad records than this end the run: the stream is not what the schema says."""
JUDGED: Final = 1000
"""Records after which that is judged."""
ROOM: Final = 0.9
"""Share of the limit to which waiting records are cut, so that not each new one is a cut of its own."""


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Limits of what a rank reads ahead and lets wait."""

    ahead: int
    """Records that are read ahead, at least, if so many have come."""
    chunk: int
    """Records that are read at once, at most."""
    backlog: int = 0
    """Records that may wait, with those that were read ahead; 0: any number, which stay where the stream
    keeps them."""
    policy: str = "newest"
    """What is kept if more wait, one of `POLICIES`."""
    seed: int = 0
    """Of `sample`."""


@dataclass
class _Chunk:
    """Records that were read and are not all taken."""

    fetched: Fetched
    state: PartitionState
    """Of the partition before the chunk."""
    kept: NDArray[np.int64]
    """Positions in the fetched rows of those that are trained."""
    read_s: float
    taken: int = 0
    """Of `kept`."""

    @property
    def num_left(self) -> int:
        return len(self.kept) - self.taken

    def state_after(self, num_taken: int) -> PartitionState:
        """State of the partition once so many of `kept` are trained, up to the next of them."""
        fetched, state = self.fetched, self.state
        is_whole = num_taken == len(self.kept)
        end = fetched.end if is_whole else int(fetched.checked.records[self.kept[num_taken]])
        done = end - state.place.record
        num_bad = sum(record < end for record in fetched.checked.bad)
        return replace(
            state,
            place=Place(state.place.unit, end),
            stretches=after(state.stretches, done),
            trained=state.trained + num_taken,
            left_out=state.left_out + done - num_taken - num_bad,
            bad=state.bad + num_bad,
        )


class PartitionReader:
    """Reads some partitions of a stream ahead.

    Args:
        source: the stream.
        states: of the partitions to read.
        config: how much.
        known: what has come to the partitions.
    """

    def __init__(
        self,
        source: StreamSource,
        states: Mapping[str, PartitionState],
        config: ReaderConfig,
        known: Mapping[str, Known],
    ) -> None:
        self._source, self._config = source, config
        self._states = dict(states)
        """After all that was read; the thread's own."""
        self._known = {name: set(each.units) for name, each in known.items()}
        self._expected = known
        """What the source is not told yet."""
        self._num_found = dict.fromkeys(states, 0)
        self._found: deque[tuple[str, Sequence[FoundUnit]]] = deque()
        """What is not offered yet."""
        self._chunks: deque[_Chunk] = deque()
        # each of these is written by one thread, and deques are safe: no lock that a signal could find taken
        self._num_read = self._num_taken = self._unread = 0
        self._has_looked = False
        self._quiet_since_s: float | None = None
        self._idle_s = 0.0
        self._bad = Counter[str]()
        """Bad records by their reasons without digits."""
        self._examples: dict[str, str] = {}
        """The newest reason of each of these."""
        self._has_room = threading.Event()
        self._background = Background("stream-reader")
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Start the thread."""
        self._running = self._background.submit(self._run)

    def offer(self, limit: int) -> Offer:
        """Offer at most `limit` records.

        Raises:
            BaseException: what reading has raised.
        """
        if self._running is not None and self._running.done():
            self._running.result()
        now, left = time.monotonic(), limit
        states: dict[str, PartitionState] = {}
        first: _Chunk | None = None
        for chunk in list(self._chunks):
            if left == 0:
                break
            first = first or chunk
            num = min(left, chunk.num_left)
            left -= num
            states[chunk.fetched.partition] = chunk.state_after(chunk.taken + num)
        found: dict[str, list[FoundUnit]] = {}
        while self._found:  # after the chunks, as the thread adds what it finds before it reads it
            name, units = self._found.popleft()
            found.setdefault(name, []).extend(units)
        all_states = dict(self._states)
        if self._idle_s and not self._chunks:  # checked in this order: the thread ends its idleness first
            states = all_states  # with what was left out after the last record
        return Offer(
            size=limit - left,
            waiting=self._num_read - self._num_taken + self._unread,
            waited_s=now - first.read_s if first else 0.0,
            idle_s=self._idle_s,
            lag_s=max(0.0, time.time() - first.fetched.arrived_s) if first else 0.0,
            has_looked=self._has_looked,
            states=states,
            found=found,
        )

    def take(self, size: int) -> list[Rows]:
        """Take the first `size` of the offered records."""
        pieces: list[Rows] = []
        self._num_taken += size
        while size:
            chunk = self._chunks[0]
            num = min(size, chunk.num_left)
            size -= num
            rows = chunk.fetched.checked.rows
            assert rows is not None, "records are offered only if there are rows"
            pieces.append(rows.pick(chunk.kept[chunk.taken : chunk.taken + num]))
            chunk.taken += num
            if not chunk.num_left:
                self._chunks.popleft()
        self._has_room.set()
        return pieces

    def close(self) -> None:
        """End the thread; safe to repeat."""
        self._background.close(CLOSE_S)

    def _run(self) -> None:
        while not self._background.closed:
            self._has_room.clear()
            if not self.read_once():
                self._has_room.wait(POLL_S)

    def read_once(self) -> bool:
        """Read one chunk if there is room; whether any records had come. The thread does nothing else."""
        for name, known in self._expected.items():
            self._source.expect(name, self._states[name].place, known)
        self._expected = {}
        self._count_unread()
        self._has_looked = True
        is_full = self._num_read - self._num_taken >= self._config.ahead
        fetched = None if is_full else self._fetch()
        self._note_found()
        if fetched is None:
            if not is_full:
                self._note_quiet()
            return False
        self._quiet_since_s, self._idle_s = None, 0.0
        state, begin = self._states[fetched.partition], fetched.begin
        if begin.unit == state.place.unit and begin > state.place:  # those between were deleted there
            gone = begin.record - state.place.record
            left = after(state.stretches, gone)
            state = replace(state, left_out=state.left_out + gone, stretches=left)
        state = replace(state, place=begin)
        key = f"{self._config.seed} {fetched.partition}"
        is_kept = chosen(state.stretches, begin, fetched.end - begin.record, key)
        kept = np.flatnonzero(is_kept[fetched.checked.records - begin.record])
        chunk = _Chunk(fetched, state, kept, time.monotonic())
        self._states[fetched.partition] = chunk.state_after(len(kept))
        if len(kept):  # else what it leaves out is part of the state before the next chunk
            self._chunks.append(chunk)
            self._num_read += len(kept)
            self._unread = max(self._unread - len(kept), 0)  # a sample may differ from what was expected
        self._judge(fetched)
        return True

    def _fetch(self) -> Fetched | None:
        """The next records of which some are trained."""
        for name in self._states:
            self._skip(name)
        places = {name: state.place for name, state in self._states.items()}
        return self._source.fetch(places, self._config.chunk)

    def _note_found(self) -> None:
        for name, known in self._known.items():
            if found := self._source.found(name, self._num_found[name]):
                self._num_found[name] += len(found)
                self._found.append((name, [each for each in found if each not in known]))

    def _note_quiet(self) -> None:
        """Count how long looks at the stream, each of which may take long, have shown nothing."""
        if not self._source.is_quiet:
            self._quiet_since_s, self._idle_s = None, 0.0
            return
        now = time.monotonic()
        self._quiet_since_s = self._quiet_since_s or now
        self._idle_s = now - self._quiet_since_s

    def _skip(self, partition: str) -> None:
        """Skip records of which none is trained without reading them."""
        state = self._states[partition]
        if state.stretches and state.stretches[0].kept == 0:
            place, skipped = self._source.skip(partition, state.place, state.stretches[0].length)
            left = after(state.stretches, skipped)
            self._states[partition] = replace(
                state, place=place, stretches=left, left_out=state.left_out + skipped
            )

    def _count_unread(self) -> None:
        """Count what has come and is not read, and cut it to what may wait."""
        waiting = {name: self._source.waiting(name, state.place) for name, state in self._states.items()}
        kept = {name: num_kept(self._states[name].stretches, each) for name, each in waiting.items()}
        limit, num_ahead = self._config.backlog, self._num_read - self._num_taken
        if limit and sum(kept.values()) + num_ahead > limit:
            policy, room = POLICIES[self._config.policy], max(int(limit * ROOM) - num_ahead, 0)
            shares: Mapping[str, int] = shares_of(room, kept)
            if self._config.policy != "sample":
                places = {name: state.place for name, state in self._states.items()}
                shares = self._source.shares(places, room, newest=self._config.policy == "newest")
            for name, state in self._states.items():
                left = policy(state.stretches, waiting[name], shares[name])
                self._states[name] = replace(state, stretches=left)
                kept[name] = num_kept(left, waiting[name])
        self._unread = sum(kept.values())

    def _judge(self, fetched: Fetched) -> None:
        """Log bad records, and refuse a stream that has had too many, also before a restart."""
        for record, reason in fetched.checked.bad.items():
            kind = _DIGITS.sub("#", reason)  # the same mistake with another value
            self._bad[kind] += 1
            self._examples[kind] = reason
            if str(self._bad[kind]).strip("0") == "1":  # the first, the tenth, the hundredth...
                where = self._source.where(fetched.partition, Place(fetched.begin.unit, record))
                such = "" if self._bad[kind] == 1 else f" (one of {self._bad[kind]:,} alike so far)"
                logger.warning("%s: left out%s: %s", where, such, reason)
        num_bad = sum(each.bad for each in self._states.values())
        num_records = num_bad + sum(each.trained for each in self._states.values())
        if num_records >= JUDGED and num_bad > BAD_SHARE * num_records:
            reason = "see the log of earlier starts"
            if self._bad:
                reason = self._examples[self._bad.most_common(1)[0][0]].rstrip(".")
            raise ValueError(
                f"{num_bad:,} of the first {num_records:,} records cannot be trained, most of them for "
                f"this reason: {reason}. Is this the stream that the data set of data.uri describes? Correct "
                "one of both, and resume the run"
            )
