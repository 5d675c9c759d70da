"""The largest magnitudes of a long vector, in one pass over it.

Magnitudes are compared as integers: without its sign, the bit pattern of a float grows with its magnitude,
infinity comes after all numbers and NaN after infinity. Every float has its place, denormals too.

The vector is read in chunks that fit a core's cache. Of each, only what exceeds a bound is held; when that
is too much, all but the largest are dropped, and the smallest of these is the new bound. So the answer is
exact, and memory of the order of what is asked for, whatever the vector and the first bound are. What the
first bound decides is speed: one that a sample suggests lets little more than needed through.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
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
"""Values read at a time on the CPU: with what is made of them they fit a core's cache."""
CHUNK_OF_DEVICE: Final = 2**24
"""The same on a GPU, where starting costs more than the cache saves."""
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
    sample = vector[positions].view(torch.int32).bitwise_and_(MAGNITUDE)
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
    held = _Held(num_wanted, above.to(vector.device))
    scan = _scan_on_cpu if vector.device.type == "cpu" else _scan_on_device
    for indices, magnitudes in scan(bits, held, up_to):
        held.add(indices, magnitudes)
    return held.largest()


class _Held:
    """Indices and magnitudes that may be among those wanted, in ascending order of the indices."""

    def __init__(self, num_wanted: int, bound: Tensor) -> None:
        self.bound = bound
        """Only magnitudes that exceed it are of interest."""
        self.num = 0
        self._num_wanted = num_wanted
        self._indices = [torch.empty(0, dtype=torch.int64, device=bound.device)]
        self._magnitudes = [torch.empty(0, dtype=torch.int32, device=bound.device)]

    def add(self, indices: Tensor, magnitudes: Tensor) -> None:
        """Hold more, which come after those held."""
        self._indices.append(indices)
        self._magnitudes.append(magnitudes)
        self.num += len(indices)
        if self.num > 2 * self._num_wanted + SPARE:
            self._drop()

    def largest(self) -> Tensor:
        """Indices of those wanted, of all that were held."""
        if self.num > self._num_wanted:
            self._drop()
        return torch.cat(self._indices)

    def _drop(self) -> None:
        """Drop all but those wanted. Later ones must exceed the smallest of these."""
        indices, magnitudes = torch.cat(self._indices), torch.cat(self._magnitudes)
        self.bound = magnitudes.topk(self._num_wanted, sorted=False).values.min()
        larger, equal = magnitudes > self.bound, magnitudes == self.bound
        kept = larger | (equal & (equal.cumsum(0) <= self._num_wanted - larger.sum()))
        kept = kept.nonzero().view(-1)
        self._indices, self._magnitudes = [indices[kept]], [magnitudes[kept]]
        self.num = self._num_wanted


def _scan_on_cpu(bits: Tensor, held: _Held, up_to: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices and magnitudes of what exceeds the bound of the moment, chunk by chunk.

    NumPy finds the few flags that are set many times faster than PyTorch does. It works with one thread, and
    that is well: several would have to meet after each chunk, and on a busy machine wait long for each other.
    """
    everything = bits.numpy()
    # memory that every chunk uses again: its first use costs more than all that is done in it
    magnitudes, flags = np.empty(CHUNK, np.int32), np.empty(CHUNK, np.bool_)
    for start in range(0, everything.size, CHUNK):
        chunk = everything[start : start + CHUNK]
        magnitude = np.bitwise_and(chunk, MAGNITUDE, out=magnitudes[: chunk.size])
        flag = np.greater(magnitude, held.bound.numpy(), out=flags[: chunk.size])
        if up_to is not None:
            flag &= magnitude <= up_to.numpy()
        positions = np.flatnonzero(flag)
        if positions.size:
            found = magnitude[positions]
            positions += start
            yield torch.from_numpy(positions), torch.from_numpy(found)


def _scan_on_device(bits: Tensor, held: _Held, up_to: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """As `_scan_on_cpu`, in chunks so large that the host waits for few."""
    for number, chunk in enumerate(torch.split(bits, CHUNK_OF_DEVICE)):
        magnitude = chunk & MAGNITUDE
        flag = magnitude > held.bound
        if up_to is not None:
            flag &= magnitude <= up_to
        positions = flag.nonzero().view(-1)
        yield positions + number * CHUNK_OF_DEVICE, magnitude[positions]
