"""The distribution of rows over ranks and steps: a pure function, from which exact positions follow.

An epoch is one pass over all rows: each row goes to one rank, once. There are two orders.

`stripes`: rows are consumed in time order. A stripe is the next `world_size x batch_size x
window_batches` rows that are left. Rank r takes the r-th contiguous run of the
stripe, so that it reads only its own row groups; it shuffles the run and cuts it into batches. The
last stripe is shorter: every rank gets the same number of full batches of it.

`seldp`, of SelSync (arXiv 2307.07950): rows are cut, in time order, into `world_size` chunks of
equally many full batches. In epoch e rank r reads chunk (r + e) mod world_size, window by window.
So ranks are at different times of the log at every moment, and rank r goes through chunks r, r + 1,
... and wraps, epoch by epoch. Here the paper's epoch, in which every worker sees all rows, takes
`world_size` epochs, whose rows are the paper's, rank by rank. An epoch stays one pass over the rows
because then steps, samples, the length of a run and a position in it mean the same in both orders,
and none of them changes with the number of ranks. In a run of one epoch, a rank sees its own chunk
only.

In both, what is left in the end is the tail of fewer than `world_size x batch_size` rows.

Ranks may have batches of different sizes: then a rank's runs or chunks are as much longer.

A `Phase` is a part of an epoch with one world size, one order, and one batch size of each rank. When a run
resumes with others, or changes the sizes, the next phase distributes exactly the rows that the phases before
it have left, including those of interrupted windows. The order of an epoch thus follows from the number of
rows, the seed, the epoch and the list of phases, and a position needs nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from data.loader.row_set import RowNumbers, RowSet


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of an epoch with one distribution of rows."""

    world_size: int
    """Number of ranks that share the rows."""
    batch_size: int
    """Samples of one rank in one step."""
    window_batches: int
    """Shuffle window, in batches of one rank."""
    order: str = "stripes"
    """One of `ORDERS`; absent in positions of versions with one order."""
    sizes: tuple[int, ...] = ()
    """Samples of each rank in one step, if they differ; else none, and `batch_size` is that of all ranks."""
    steps: int = 0
    """Finished steps of this phase, equal on all ranks."""

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.before(self.world_size)

    def size(self, rank: int) -> int:
        """Samples of a rank in one step."""
        return self.sizes[rank] if self.sizes else self.batch_size

    def before(self, rank: int) -> int:
        """Samples of all lower ranks in one step."""
        return sum(self.sizes[:rank]) if self.sizes else rank * self.batch_size

    def same_shape(self, other: "Phase") -> bool:
        """Whether both phases distribute rows in the same way."""
        return replace(self, steps=0) == replace(other, steps=0)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive batches of one rank, with the samples `rows[order]`."""

    rows: RowNumbers
    """Ascending row numbers to read."""
    order: RowNumbers
    """Positions in `rows`, one per sample; their number is a multiple of `batch_size`."""
    batch_size: int
    """Samples of the rank in one step."""
    num_valid: int
    """Number of real samples; the others are padding of the last batch."""


@dataclass(frozen=True, kw_only=True)
class PhaseOrder(ABC):
    """Distribution of the rows of one phase.

    Attributes:
        rows: rows that were left at the start of the phase.
        phase: world size, batch size and window; its `steps` are ignored.
        shuffle: shuffle inside each window, else keep the time order.
        key: of the random order: seed, epoch and number of the phase in the epoch.
    """

    rows: RowSet
    phase: Phase
    shuffle: bool
    key: tuple[int, int, int]

    @cached_property
    def full_steps(self) -> int:
        """Steps in which every rank gets a full batch."""
        return len(self.rows) // self.phase.global_batch

    @cached_property
    def tail_rows(self) -> int:
        """Rows after the last full step, fewer than one global batch."""
        return len(self.rows) % self.phase.global_batch

    def num_steps(self, drop_last: bool) -> int:
        """Steps of the whole phase; without `drop_last` the tail makes one more, padded step."""
        return self.full_steps + (0 if drop_last or self.tail_rows == 0 else 1)

    def window(self, step: int, rank: int) -> Window:
        """The batches of `rank` from `step` to the end of its window.

        Args:
            step: in `[0, num_steps(drop_last=False))`.
            rank: in `[0, world_size)`.
        """
        if step == self.full_steps:
            return self._padded_batch(rank)
        number, done = divmod(step, self.phase.window_batches)
        window = self._whole_window(number, rank)
        order = window.order[done * window.batch_size :]
        return replace(window, order=order, num_valid=len(order))

    def remaining(self, steps: int) -> RowSet:
        """Rows that are left after `steps` steps."""
        leftovers = np.empty(0, np.int64)
        if steps > self.full_steps:
            return self.rows.only([], also=leftovers)
        number, done = divmod(steps, self.phase.window_batches)
        if done:
            windows = [self._whole_window(number, rank) for rank in range(self.phase.world_size)]
            left = [window.rows[window.order[done * window.batch_size :]] for window in windows]
            leftovers = np.concatenate(left)
        begun = min(self.full_steps, (number + bool(done)) * self.phase.window_batches)
        return self.rows.only(self._untouched(begun), also=leftovers)

    @abstractmethod
    def _begin(self, step: int, rank: int, num_steps: int) -> int:
        """Position in `rows` at which the window of `rank` begins.

        Args:
            step: the window's first.
            rank: in `[0, world_size)`.
            num_steps: of the window.
        """

    @abstractmethod
    def _untouched(self, steps: int) -> list[tuple[int, int]]:
        """Ranges of positions in `rows` outside all windows of the first `steps` steps."""

    def _whole_window(self, number: int, rank: int) -> Window:
        step = number * self.phase.window_batches
        num_steps, size = min(self.phase.window_batches, self.full_steps - step), self.phase.size(rank)
        begin, length = self._begin(step, rank, num_steps), num_steps * size
        order = np.arange(length)
        if self.shuffle:
            order = permutation(length, (*self.key, number, rank))
        return Window(
            rows=self.rows.part(begin, begin + length), order=order, batch_size=size, num_valid=length
        )

    def _padded_batch(self, rank: int) -> Window:
        """The tail, distributed as whole steps are, as one padded batch per rank."""
        phase, size = self.phase, self.phase.size(rank)
        begin = len(self.rows) - self.tail_rows
        mine = [begin + self.tail_rows * phase.before(r) // phase.global_batch for r in (rank, rank + 1)]
        num_valid = mine[1] - mine[0]
        rows = self.rows.part(*mine) if num_valid else self.rows.part(begin, begin + 1)
        order = np.minimum(np.arange(size), len(rows) - 1)
        return Window(rows=rows, order=order, batch_size=size, num_valid=num_valid)


class Stripes(PhaseOrder):
    """All ranks read the log together, each a run of every stripe."""

    def _begin(self, step: int, rank: int, num_steps: int) -> int:
        return step * self.phase.global_batch + num_steps * self.phase.before(rank)

    def _untouched(self, steps: int) -> list[tuple[int, int]]:
        return [(steps * self.phase.global_batch, len(self.rows))]


class RotatedChunks(PhaseOrder):
    """Each rank reads a chunk of its own, and the next chunk in the next epoch (SelDP)."""

    def _begin(self, step: int, rank: int, num_steps: int) -> int:
        _, epoch, _ = self.key
        return self._chunk((rank + epoch) % self.phase.world_size) + step * self.phase.size(rank)

    def _untouched(self, steps: int) -> list[tuple[int, int]]:
        world = self.phase.world_size
        chunks = [
            (self._chunk(number) + steps * self._size(number), self._chunk(number + 1))
            for number in range(world)
        ]
        return [*chunks, (self._chunk(world), len(self.rows))]

    def _chunk(self, number: int) -> int:
        """Position of the start of chunk `number`, or of the tail for `world_size`."""
        return self.full_steps * sum(map(self._size, range(number)))

    def _size(self, number: int) -> int:
        """Rows of chunk `number` in one step, those of the rank that reads it."""
        _, epoch, _ = self.key
        return self.phase.size((number - epoch) % self.phase.world_size)


ORDERS: Final[dict[str, type[PhaseOrder]]] = {"stripes": Stripes, "seldp": RotatedChunks}


def current_order(
    num_rows: int, phases: Sequence[Phase], *, shuffle: bool, seed: int, epoch: int
) -> PhaseOrder:
    """The order of the last of `phases`, after the steps of all phases before it."""
    rows = RowSet.span(0, num_rows)
    for number, phase in enumerate(phases):
        deal = ORDERS[phase.order]
        order = deal(rows=rows, phase=phase, shuffle=shuffle, key=(seed, epoch, number))
        if number + 1 < len(phases):
            rows = order.remaining(phase.steps)
    return order


def permutation(length: int, key: Sequence[int]) -> RowNumbers:
    """A random order of `range(length)` that depends only on `key`.

    It sorts raw random words, because NumPy promises the stream of a bit generator for ever but not
    what `Generator.permutation` makes of it; a stored position must survive a NumPy upgrade.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(words, kind="stable")
