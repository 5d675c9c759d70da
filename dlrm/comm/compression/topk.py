"""The largest magnitudes of a long vector, in one pass over it.

Magnitudes are compared as integers: without its sign, the bit pattern of a float grows with its magnitude,
infinity comes after all numbers and NaN after infinity. Every float has its place, denormals too.

On the CPU the vector is read in chunks that fit a core's cache. Of each, only what exceeds a bound is held;
when that is too much, all but the largest are dropped, and the smallest of these is the new bound. So the
answer is exact, and memory of the order of what is asked for, whatever the vector and the first bound are.
What the first bound decides is speed: one that a sample suggests lets little more than needed through.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAGNITUDE: Final = 0x7FFFFFFF
"""All bits of a float but its sign."""
NOTHING: Final = -1
"""The bound that every magnitude exceeds."""
SAMPLE: Final = 2**14
"""Values in the sample at most."""
SAMPLED: Final = 16
"""A sample is one of so many values at most."""
MARGIN: Final = 4
"""How many standard deviations of the sample's error the suggested bound stays on the safe side."""
CHUNK: Final = 2**16
"""Values read at a time: with what is made of them they fit a core's cache."""
SPARE: Final = 2**16
"""Held at most, besides twice what is asked for."""


def bound_below(value: float) -> Tensor:
    """The bound that exactly magnitudes of at least `value`, as a float32, exceed; int32, no dimensions."""
    return torch.tensor(value, dtype=torch.float32).view(torch.int32) - 1


def suggested_bound(vector: Tensor, num_wanted: int) -> Tensor:
    """A bound that `num_wanted` magnitudes, and few more, probably exceed; int32, no dimensions.

    Args:
        vector: fp32 `[d]`.
        num_wanted: from 1 to d.
    """
    size = vector.numel()
    positions = sample_positions(size, vector.device)
    expected = positions.numel() * num_wanted / size
    rank = math.ceil(expected + MARGIN * math.sqrt(expected) + MARGIN)
    if rank >= positions.numel():
        return torch.full((), NOTHING, dtype=torch.int32, device=vector.device)
    # `take` starts no threads for so few, which indexing would do
    sample = vector.take(positions).view(torch.int32).bitwise_and_(MAGNITUDE)
    return sample.topk(rank, sorted=False).values.min() - 1


def sample_positions(size: int, device: torch.device) -> Tensor:
    """Different positions below `size`, evenly spread yet in step with no regular pattern.

    Multiples of the golden ratio are that at all scales, and need no random numbers.
    """
    stride = int(size * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, size) > 1:
        stride += 1
    return torch.arange(min(SAMPLE, size // SAMPLED), device=device).mul_(stride).remainder_(size)


def largest(vector: Tensor, num_wanted: int, above: Tensor, up_to: Tensor | None = None) -> Tensor:
    """Ascending indices of the `num_wanted` largest magnitudes within bounds, or of all if there are fewer.

    Of equal magnitudes the first ones are taken.

    Args:
        vector: fp32 `[d]`.
        num_wanted: at least 1.
        above: bound that the magnitudes exceed, int32 without dimensions.
        up_to: bound that they do not exceed, likewise; None: there is none.

    Returns:
        int64 `[n]`, n <= `num_wanted`.
    """
    bits = vector.detach().view(torch.int32)
    if vector.device.type != "cpu":
        return largest_on_device(bits, num_wanted, above.to(vector.device), up_to)
    found = _largest_on_cpu(bits.numpy(), num_wanted, int(above), None if up_to is None else int(up_to))
    return torch.from_numpy(found)


def largest_on_device(bits: Tensor, num_wanted: int, above: Tensor, up_to: Tensor | None) -> Tensor:
    """`largest` where chunks would gain nothing and each would keep the host waiting: on a GPU."""
    magnitudes = bits & MAGNITUDE
    flags = magnitudes > above
    if up_to is not None:
        flags &= magnitudes <= up_to
    indices = flags.nonzero().view(-1)
    if len(indices) <= num_wanted:
        return indices
    magnitudes = magnitudes[indices]
    least = magnitudes.topk(num_wanted, sorted=False).values.min()
    larger, equal = magnitudes > least, magnitudes == least
    return indices[larger | (equal & (equal.cumsum(0) <= num_wanted - larger.sum()))]


def _largest_on_cpu(
    bits: npt.NDArray[np.int32], num_wanted: int, above: int, up_to: int | None
) -> npt.NDArray[np.int64]:
    """`largest` by NumPy, which finds the few flags that are set many times faster than PyTorch does.

    It works with one thread, and that is well: several would have to meet after each chunk, and on a busy
    machine wait long for each other.
    """
    held = _Held(num_wanted, above)
    # memory that every chunk uses again: its first use costs more than all that is done in it
    magnitudes, flags = np.empty(CHUNK, np.int32), np.empty(CHUNK, np.bool_)
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        magnitude = np.bitwise_and(chunk, MAGNITUDE, out=magnitudes[: chunk.size])
        flag = np.greater(magnitude, held.bound, out=flags[: chunk.size])
        if up_to is not None:
            flag &= magnitude <= up_to
        positions = np.flatnonzero(flag)
        if positions.size:
            held.add(positions + start, magnitude[positions])
    return held.largest()


class _Held:
    """Indices and magnitudes that may be among those wanted, in ascending order of the indices."""

    def __init__(self, num_wanted: int, bound: int) -> None:
        self.bound = bound
        """Only magnitudes that exceed it are of interest."""
        self.num = 0
        self._num_wanted = num_wanted
        self._indices = [np.empty(0, np.int64)]
        self._magnitudes = [np.empty(0, np.int32)]

    def add(self, indices: npt.NDArray[np.int64], magnitudes: npt.NDArray[np.int32]) -> None:
        """Hold more, which come after those held."""
        self._indices.append(indices)
        self._magnitudes.append(magnitudes)
        self.num += indices.size
        if self.num > 2 * self._num_wanted + SPARE:
            self._drop()

    def largest(self) -> npt.NDArray[np.int64]:
        """Indices of those wanted, of all that were held."""
        if self.num > self._num_wanted:
            self._drop()
        return np.concatenate(self._indices)

    def _drop(self) -> None:
        """Drop all but those wanted. Later ones must exceed the smallest of these."""
        indices, magnitudes = np.concatenate(self._indices), np.concatenate(self._magnitudes)
        self.bound = int(magnitudes.min())
        if np.count_nonzero(magnitudes > self.bound) > self._num_wanted:
            # not by np.partition, which is twenty times slower where nearly all are equal
            wanted = torch.from_numpy(magnitudes).topk(self._num_wanted, sorted=False).values
            self.bound = int(wanted.numpy().min())
        kept = magnitudes >= self.bound
        num_spare = np.count_nonzero(kept) - self._num_wanted
        if num_spare:
            kept[np.flatnonzero(magnitudes == self.bound)[-num_spare:]] = False
        self._indices, self._magnitudes = [indices[kept]], [magnitudes[kept]]
        self.num = self._num_wanted
