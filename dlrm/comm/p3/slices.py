"""P3's slices (Jayarajan et al., arXiv 1905.03960): how a gradient is cut into messages, and their order.

Large tensors are cut, so that no message delays a more urgent one for long; small ones share a message, as
each message has a cost whatever its size. As in P3's priority queue, of all ready messages the one that the
next forward pass needs first is sent first.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SLICE_VALUES: Final = 50_000
"""Largest slice, the best size in the paper."""
FUSE_VALUES: Final = 8_192
"""Tensors below this size share a message of at least 32 KB, whose time is about a network's latency."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A range of the flat gradient that is sent in one message."""

    name: str
    """Names of the tensors in the slice; of a cut tensor, with the range of its values."""
    begin: int
    """Index of the first value."""
    end: int
    """Index after the last value."""
    parameters: tuple[int, ...]
    """Indices of the parameters with values in the slice."""


def lay_out(
    sizes: Mapping[str, int], slice_values: int = SLICE_VALUES, fuse_values: int = FUSE_VALUES
) -> tuple[list[slice], list[Slice]]:
    """Cut large tensors and fuse small ones, by the arguments alone, so that all ranks do the same.

    Small tensors are fused with later ones, across large ones, until they have `fuse_values` together.

    Args:
        sizes: values of each parameter by name, in about the order in which the forward pass uses them.
        slice_values: largest size of a slice.
        fuse_values: smaller tensors share a slice; 0: none do.

    Returns:
        Where each parameter's values are in the flat gradient, and the slices, which cover it in order.

    Raises:
        ValueError: two tensors that may be fused do not fit into a slice.
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
    return places, slices


def _fused(counts: Sequence[int], fuse_values: int) -> list[list[int]]:
    """Group tensors: each large one alone, small ones together, ordered by the first of each group."""
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
    """Cut a range of the flat gradient into as few slices as possible, of about equal size."""
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
    """Compute the order in which P3's priority queue would send slices, one at a time.

    Args:
        ready_s: seconds at which each slice's gradient is ready.
        needed: when the next forward pass needs each slice: smaller is sooner.
        takes_s: seconds that each slice's exchange takes.
    """
    coming = sorted(range(len(ready_s)), key=lambda index: (ready_s[index], needed[index], index))
    queue: list[tuple[int, int]] = []
    order: list[int] = []
    now_s, arrived = 0.0, 0
    while len(order) < len(coming):
        if not queue:
            now_s = max(now_s, ready_s[coming[arrived]])
        # all that became ready while the last slice was sent compete for the link
        while arrived < len(coming) and ready_s[coming[arrived]] <= now_s:
            index = coming[arrived]
            heapq.heappush(queue, (needed[index], index))
            arrived += 1
        _, index = heapq.heappop(queue)
        order.append(index)
        now_s += takes_s[index]
    return order
