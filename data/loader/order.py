"""Which rows each rank gets at each step: a pure function, and the heart of an exact position.

Rows are consumed in time order, in stripes. A stripe is the next `world_size x batch_size x
window_batches` rows that were not handed out yet. Rank r takes the r-th contiguous run of the
stripe, so that it reads only its own row groups; it shuffles the run and cuts it into batches. The
last stripe is shorter: every rank gets the same number of full batches of it, and what remains is
the tail of fewer than `world_size x batch_size` rows.

A `Phase` is a stretch of an epoch with one world size and batch size. When a run resumes with
others, the next phase starts on exactly the rows that the phases before it did not hand out, the
leftovers of the interrupted stripe first. So the order of an epoch follows from the number of rows,
the seed, the epoch and the list of phases so far, and nothing else needs to be saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

RowNumbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of an epoch in which nothing about the distribution of rows changed."""

    world_size: int
    """Ranks that shared the rows."""
    batch_size: int
    """Samples of one rank in one step."""
    window_batches: int
    """Shuffle window, in batches of one rank."""
    steps: int = 0
    """Steps handed out in this phase, equal on all ranks."""

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.world_size * self.batch_size

    def same_shape(self, other: "Phase") -> bool:
        """Whether both deal the rows out in the same way, however far they came."""
        return replace(self, steps=0) == replace(other, steps=0)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Ascending row numbers: some scattered ones, then all of `range(start, stop)`."""

    start: int
    stop: int
    scattered: RowNumbers = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.scattered) + self.stop - self.start

    def part(self, begin: int, end: int) -> RowNumbers:
        """The rows at positions `begin` to `end`, ascending."""
        start = self.start - len(self.scattered)
        run = np.arange(start + max(begin, len(self.scattered)), start + end, dtype=np.int64)
        few = self.scattered[begin:end]
        return np.concatenate([few, run]) if len(few) else run

    def after(self, position: int, also: RowNumbers) -> "Rows":
        """What is left when the first `position` rows are gone, except `also`, which stay."""
        skipped = max(0, position - len(self.scattered))
        scattered = np.concatenate([np.sort(also), self.scattered[position:]])
        return Rows(start=self.start + skipped, stop=self.stop, scattered=scattered)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some consecutive batches of one rank: `rows[order]` are their samples in hand-out order."""

    rows: RowNumbers
    """Ascending row numbers to read."""
    order: RowNumbers
    """Positions in `rows`, one a sample; a multiple of the batch size, unless padded below."""
    num_valid: int
    """Samples that count; the others are padding in the last batch."""


@dataclass(frozen=True, kw_only=True)
class PhaseOrder:
    """How one phase deals `rows` out.

    Attributes:
        rows: what was not handed out when the phase began.
        phase: world size, batch size and window; its `steps` are not looked at.
        shuffle: shuffle inside each window, else keep the time order.
        key: what the random order depends on: seed, epoch and the number of the phase in the epoch.
    """

    rows: Rows
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
        stripe, done = divmod(step, self.phase.window_batches)
        window = self._whole_window(stripe, rank)
        order = window.order[done * self.phase.batch_size :]
        return Window(rows=window.rows, order=order, num_valid=len(order))

    def remaining(self, steps: int) -> Rows:
        """The rows that are not handed out yet after `steps` steps."""
        if steps > self.full_steps:
            return self.rows.after(len(self.rows), also=np.empty(0, np.int64))
        stripe, done = divmod(steps, self.phase.window_batches)
        position = stripe * self.phase.window_batches * self.phase.global_batch
        if done == 0:
            return self.rows.after(position, also=np.empty(0, np.int64))
        leftovers = []
        for rank in range(self.phase.world_size):
            window = self._whole_window(stripe, rank)
            leftovers.append(window.rows[window.order[done * self.phase.batch_size :]])
        position += self._batches_in(stripe) * self.phase.global_batch
        return self.rows.after(position, also=np.concatenate(leftovers))

    def _batches_in(self, stripe: int) -> int:
        """Batches every rank gets of this stripe; fewer in the last one."""
        window = self.phase.window_batches
        return min(window, self.full_steps - stripe * window)

    def _whole_window(self, stripe: int, rank: int) -> Window:
        length = self._batches_in(stripe) * self.phase.batch_size
        begin = stripe * self.phase.window_batches * self.phase.global_batch + rank * length
        order = np.arange(length)
        if self.shuffle:
            order = permutation(length, (*self.key, stripe, rank))
        return Window(rows=self.rows.part(begin, begin + length), order=order, num_valid=length)

    def _padded_batch(self, rank: int) -> Window:
        """The tail, spread evenly, as one batch a rank; missing samples repeat one that is there."""
        world, size = self.phase.world_size, self.phase.batch_size
        begin = len(self.rows) - self.tail_rows
        mine = [begin + self.tail_rows * r // world for r in (rank, rank + 1)]
        num_valid = mine[1] - mine[0]
        rows = self.rows.part(*mine) if num_valid else self.rows.part(begin, begin + 1)
        order = np.minimum(np.arange(size), len(rows) - 1)
        return Window(rows=rows, order=order, num_valid=num_valid)


def current_order(
    num_rows: int, phases: Sequence[Phase], *, shuffle: bool, seed: int, epoch: int
) -> PhaseOrder:
    """The order of the last of `phases`, after all the phases before it did their steps."""
    rows = Rows(start=0, stop=num_rows)
    for number, phase in enumerate(phases):
        order = PhaseOrder(rows=rows, phase=phase, shuffle=shuffle, key=(seed, epoch, number))
        rows = order.remaining(phase.steps)
    return order


def permutation(length: int, key: Sequence[int]) -> RowNumbers:
    """A random order of `range(length)` that depends only on `key`.

    It sorts raw random words, because NumPy promises the stream of a bit generator for ever but not
    what `Generator.permutation` makes of it; a stored position must outlive a NumPy upgrade.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(words, kind="stable")
