"""The largest magnitudes of a long vector, in one pass over it.

Magnitudes are compared as integers: without its sign, the bit pattern of a float grows with its magnitude,
infinity comes after all numbers and NaN after infinity. Every float has its place, denormals too.

The vector is read in chunks that fit a core's cache. Of each, only what exceeds a bound is held; when that
is too much, all but the largest are dropped, and the smallest of these is the new bound. So the answer is
exact, and memory of the order of what is asked for, whatever the vector and the first bound are. What the
first bound decides is speed: one that a sample suggests lets little more than needed through.
"""

import math
from typing import Final

import torch
from torch import Tensor

MAGNITUDE: Final = 0x7FFFFFFF
"""All bits of a float but its sign."""
NOTHING: Final = -1
"""The bound that every magnitude exceeds."""
SAMPLE: Final = 2**16
"""Values in the sample at most."""
SAMPLED: Final = 16
"""A sample is one of so many values at most."""
MARGIN: Final = 4
"""How many standard deviations of the sample's error the suggested bound stays on the safe side."""
CHUNK: Final = 2**15
"""Values read at a time: with what is made of them they fit the cache of a core, or of two."""
CHUNK_OF_DEVICE: Final = 2**24
"""The same where a launch costs more than the cache saves: on a GPU."""
SPARE: Final = 2**16
"""Held at most, besides twice what is asked for."""
WORD: Final = 8
"""Flags that are looked at at once."""


def bound_below(value: float) -> int:
    """The bound that exactly magnitudes of at least `value`, as a float32, exceed."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) - 1


def suggested_bound(vector: Tensor, num_wanted: int) -> Tensor:
    """A bound that `num_wanted` magnitudes, and few more, probably exceed; int32 without dimensions.

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


def largest(vector: Tensor, num_wanted: int, above: Tensor | int, up_to: Tensor | None = None) -> Tensor:
    """Ascending indices of the `num_wanted` largest magnitudes within bounds, or of all if there are fewer.

    Of equal magnitudes the first ones are taken.

    Args:
        vector: fp32 `[d]`.
        num_wanted: at least 1.
        above: bound that the magnitudes exceed, as `suggested_bound` or `bound_below` makes it.
        up_to: bound that they do not exceed, int32 without dimensions; None: there is none.

    Returns:
        int64 `[n]`, n <= `num_wanted`.
    """
    bits = vector.view(torch.int32)
    chunk = CHUNK if vector.device.type == "cpu" else CHUNK_OF_DEVICE
    size = min(chunk, bits.numel())
    # memory that every chunk uses again, since its first use costs more than all that is done in it
    magnitudes, flags = bits.new_empty(size), bits.new_empty(size, dtype=torch.bool)
    held = _Held(num_wanted, vector.device)
    for number, part in enumerate(torch.split(bits, chunk)):
        size = part.numel()
        magnitude = torch.bitwise_and(part, MAGNITUDE, out=magnitudes[:size])
        flag = torch.gt(magnitude, above, out=flags[:size])
        if up_to is not None:
            flag &= magnitude <= up_to
        position = _positions(flag)
        if position.numel() == 0:
            continue
        held.add(position + number * chunk, magnitude[position])
        if held.num > 2 * num_wanted + SPARE:
            above = held.drop_all_but_wanted()
    if held.num > num_wanted:
        held.drop_all_but_wanted()
    return held.indices


class _Held:
    """Indices and magnitudes that may be among those wanted, in ascending order of the indices."""

    def __init__(self, num_wanted: int, device: torch.device) -> None:
        self.num = 0
        self._num_wanted = num_wanted
        self._indices = [torch.empty(0, dtype=torch.int64, device=device)]
        self._magnitudes = [torch.empty(0, dtype=torch.int32, device=device)]

    @property
    def indices(self) -> Tensor:
        """All of them."""
        return torch.cat(self._indices)

    def add(self, indices: Tensor, magnitudes: Tensor) -> None:
        """Hold more, which come after those held."""
        self._indices.append(indices)
        self._magnitudes.append(magnitudes)
        self.num += indices.numel()

    def drop_all_but_wanted(self) -> Tensor:
        """Keep the largest, and return the smallest of these."""
        indices, magnitudes = torch.cat(self._indices), torch.cat(self._magnitudes)
        least = magnitudes.topk(self._num_wanted, sorted=False).values.min()
        larger, equal = magnitudes > least, magnitudes == least
        kept = larger | (equal & (equal.cumsum(0) <= self._num_wanted - larger.sum()))
        self._indices, self._magnitudes = [indices[kept]], [magnitudes[kept]]
        self.num = self._num_wanted
        return least


def _positions(flags: Tensor) -> Tensor:
    """Ascending positions of the flags that are set, where few are: whole words without one are skipped."""
    if flags.numel() % WORD:
        return flags.nonzero().view(-1)
    words = flags.view(torch.int64).nonzero().view(-1)
    pairs = flags.view(-1, WORD)[words].nonzero()
    return words[pairs[:, 0]].mul_(WORD).add_(pairs[:, 1])
