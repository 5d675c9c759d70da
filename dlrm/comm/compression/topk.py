"""Finds the largest magnitudes of a long vector exactly, in a single pass.

Magnitudes are compared as integers: without its sign, the bit pattern of a float grows with its magnitude,
infinity comes after all numbers and NaN after infinity.

On the CPU the vector is read in chunks that fit a core's cache, and only values above a bound are held. When
too many are held, all but the largest are dropped, and the smallest of these becomes the new bound. The
result is exact for any first bound; a good one, suggested by a sample, makes it fast.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAGNITUDE: Final = 0x7FFFFFFF
"""Mask of all bits of a float but its sign."""
NOTHING: Final = -1
"""A bound that every magnitude exceeds."""
SAMPLE: Final = 2**14
"""Largest number of values in the sample."""
SAMPLED: Final = 16
"""The sample has at most one of so many values."""
MARGIN: Final = 4
"""Standard deviations of the sample's error by which the suggested bound is lowered."""
CHUNK: Final = 2**16
"""Values read at a time: with the temporary results they fit a core's cache."""
SPARE: Final = 2**16
"""Values held at most, in addition to twice the number asked for."""


def bound_below(value: float) -> Tensor:
    """Compute the bound, an int32 scalar, that exactly the magnitudes of at least `value` exceed."""
    return torch.tensor(value, dtype=torch.float32).view(torch.int32) - 1


def suggested_bound(vector: Tensor, num_wanted: int) -> Tensor:
    """Estimate from a sample a bound, an int32 scalar, that few more than `num_wanted` values exceed."""
    size = vector.numel()
    positions = sample_positions(size, vector.device)
    expected = positions.numel() * num_wanted / size
    rank = math.ceil(expected + MARGIN * math.sqrt(expected) + MARGIN)
    if rank >= positions.numel():
        return torch.full((), NOTHING, dtype=torch.int32, device=vector.device)
    # unlike indexing, `take` starts no threads for so few values
    sample = vector.take(positions).view(torch.int32).bitwise_and_(MAGNITUDE)
    return sample.topk(rank, sorted=False).values.min() - 1


def sample_positions(size: int, device: torch.device) -> Tensor:
    """Choose distinct positions below `size` that are evenly spread without any period.

    Multiples of the golden ratio are so at all scales, and need no random numbers.
    """
    stride = int(size * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, size) > 1:
        stride += 1
    return torch.arange(min(SAMPLE, size // SAMPLED), device=device).mul_(stride).remainder_(size)


def largest(vector: Tensor, num_wanted: int, above: Tensor, up_to: Tensor | None = None) -> Tensor:
    """Find the largest magnitudes within bounds; of equal ones the first.

    Args:
        vector: fp32 `[d]`.
        num_wanted: at least 1.
        above: bound that the magnitudes exceed, an int32 scalar.
        up_to: bound that they do not exceed, likewise; None: no bound.

    Returns:
        Indices int64 `[n]`, ascending, n <= `num_wanted`.
    """
    bits = vector.detach().view(torch.int32)
    if vector.device.type != "cpu":
        return largest_on_device(bits, num_wanted, above.to(vector.device), up_to)
    found = _largest_on_cpu(bits.numpy(), num_wanted, int(above), None if up_to is None else int(up_to))
    return torch.from_numpy(found)


def largest_on_device(bits: Tensor, num_wanted: int, above: Tensor, up_to: Tensor | None) -> Tensor:
    """`largest` for a GPU, where chunks gain nothing and each would make the host wait."""
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
    """`largest` by NumPy, which finds a few set flags many times faster than PyTorch.

    It uses one thread: several would have to synchronize after each chunk, and wait long on a busy machine.
    """
    held = _Held(num_wanted, above)
    # reused by every chunk: first touch of memory costs more than the work in it
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
    """Candidates for the largest magnitudes, in ascending order of their indices."""

    def __init__(self, num_wanted: int, bound: int) -> None:
        self.bound = bound
        """Magnitudes up to this bound are not among the largest."""
        self.num = 0
        self._num_wanted = num_wanted
        self._indices = [np.empty(0, np.int64)]
        self._magnitudes = [np.empty(0, np.int32)]

    def add(self, indices: npt.NDArray[np.int64], magnitudes: npt.NDArray[np.int32]) -> None:
        """Add candidates, with larger indices than those held."""
        self._indices.append(indices)
        self._magnitudes.append(magnitudes)
        self.num += indices.size
        if self.num > 2 * self._num_wanted + SPARE:
            self._drop()

    def largest(self) -> npt.NDArray[np.int64]:
        """Indices of the largest magnitudes of all that were added."""
        if self.num > self._num_wanted:
            self._drop()
        return np.concatenate(self._indices)

    def _drop(self) -> None:
        """Keep the `num_wanted` largest candidates only, and raise the bound to the smallest of them."""
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
