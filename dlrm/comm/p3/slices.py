"""What travels at once, and what goes first: P3's slices (Jayarajan et al., arXiv 1905.03960).

A large tensor is cut, so that no message holds up a more urgent one for long; small ones share a message, as
each has a price whatever its size. Which message goes first is decided as P3's priority queue would: of those
that are ready, the one that the next forward pass needs first.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SLICE_VALUES: Final = 50_000
"""The paper's best size in its sweep, and its limit."""
FUSE_VALUES: Final = 8_192
"""Tensors below this share a message, 32 KB of fp32 or more: about what a network's latency is worth."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Values of the flat gradient that travel in one message."""

    name: str
    """For people: a tensor's name, with its values where it is cut; or those of all that share it."""
    begin: int
    """First value, in the flat gradient."""
    end: int
    """First value that is not part of it."""
    parameters: tuple[int, ...]
    """Indices of those that have values in it."""


@dataclass(frozen=True, kw_only=True)
class SliceLayout:
    """How parameters lie in one flat gradient, and how that is cut."""

    places: tuple[slice, ...]
    """Of each parameter's values in the flat gradient."""
    slices: tuple[Slice, ...]
    """Side by side, of the whole flat gradient."""
    slices_of: tuple[tuple[int, ...], ...]
    """Of each parameter: the indices of the slices that have values of it."""


def lay_out(
    sizes: Mapping[str, int], slice_values: int = SLICE_VALUES, fuse_values: int = FUSE_VALUES
) -> SliceLayout:
    """Cut what is large and fuse what is small; depends on nothing but the arguments.

    Small tensors are fused with those that follow them, whatever large ones are between, until they are
    `fuse_values` together.

    Args:
        sizes: values of each parameter by name, in about the order in which the forward pass uses them.
        slice_values: a slice has at most so many.
        fuse_values: smaller tensors share a slice; 0: none do.

    Raises:
        ValueError: two tensors that are to be fused need not fit into a slice.
    """
    if slice_values < max(1, 2 * fuse_values):
        raise ValueError(
            f"slices of {slice_values} values cannot hold two tensors of less than {fuse_values}; make "
            "slice_values at least twice fuse_values"
        )
    names, counts = list(sizes), list(sizes.values())
    groups = _fused(counts, fuse_values)
    places, slices, end = [slice(0, 0)] * len(counts), list[Slice](), 0
    for group in groups:
        begin = end
        for index in group:
            places[index] = slice(end, end + counts[index])
            end += counts[index]
        label = ", ".join(names[index] for index in group)
        slices += _cut(label, begin, end, tuple(group), slice_values)
    slices_of: list[list[int]] = [[] for _ in counts]
    for number, each in enumerate(slices):
        for index in each.parameters:
            slices_of[index].append(number)
    return SliceLayout(places=tuple(places), slices=tuple(slices), slices_of=tuple(map(tuple, slices_of)))


def _fused(counts: Sequence[int], fuse_values: int) -> list[list[int]]:
    """Tensors in groups: each large one alone, small ones together; by the first of each group."""
    groups: list[list[int]] = []
    shared: list[int] | None = None
    for index, count in enumerate(counts):
        if count >= fuse_values:
            groups.append([index])
            continue
        if shared is None:
            shared = []
            groups.append(shared)
        shared.append(index)
        if sum(counts[each] for each in shared) >= fuse_values:
            shared = None
    return groups


def _cut(label: str, begin: int, end: int, parameters: tuple[int, ...], slice_values: int) -> list[Slice]:
    """A stretch of the flat gradient in as few slices as possible, of about equal size."""
    pieces = max(1, -(-(end - begin) // slice_values))
    bounds = [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]
    return [
        Slice(
            name=label if pieces == 1 else f"{label}[{first - begin}:{last - begin}]",
            begin=first,
            end=last,
            parameters=parameters,
        )
        for first, last in itertools.pairwise(bounds)
    ]


def issue_order(ready_s: Sequence[float], needed: Sequence[int], takes_s: Sequence[float]) -> list[int]:
    """The order in which P3's priority queue would send slices, one after the other.

    Args:
        ready_s: when each slice's gradient is there, in seconds.
        needed: when the next forward pass needs it: the smaller, the sooner.
        takes_s: how long each one's exchange takes, in seconds.

    Returns:
        The indices of all slices.
    """
    coming = sorted(range(len(ready_s)), key=lambda index: (ready_s[index], needed[index], index))
    queue: list[tuple[int, int]] = []
    order: list[int] = []
    now_s, arrived = 0.0, 0
    while len(order) < len(coming):
        if not queue:
            now_s = max(now_s, ready_s[coming[arrived]])
        while arrived < len(coming) and ready_s[coming[arrived]] <= now_s:
            index = coming[arrived]
            heapq.heappush(queue, (needed[index], index))
            arrived += 1
        _, index = heapq.heappop(queue)
        order.append(index)
        now_s += takes_s[index]
    return order
