"""What becomes of records that wait because more arrive than are trained.

A limit on them (`stream.backlog`) with a policy leaves some out: a partition then has *stretches*, each
of so many records of which a share is kept. They are counted from the next record to be read, and are part of
the position, so that a resumed run leaves out the same records and counts them once.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.stream.source import Place


class Stretch(NamedTuple):
    """Consecutive records, of which a share is trained."""

    length: int
    """Number of records, at least 1."""
    kept: float
    """Share that is trained: 1 all, 0 none, else chosen at random by their places."""


Stretches = tuple[Stretch, ...]
"""Of the next records of a partition; all records after them are kept."""


def after(stretches: Stretches, num_records: int) -> Stretches:
    """What is left of `stretches` after that many records."""
    left: list[Stretch] = []
    for stretch in stretches:
        gone = min(stretch.length, num_records)
        num_records -= gone
        if stretch.length > gone:
            left.append(Stretch(stretch.length - gone, stretch.kept))
    return tuple(left)


def num_kept(stretches: Stretches, waiting: int) -> int:
    """Records that are trained of the next `waiting`, as expected where a share is."""
    return round(sum(each.length * each.kept for each in _over(stretches, waiting)))


def chosen(stretches: Stretches, place: Place, num_records: int, key: str) -> NDArray[np.bool_]:
    """Which of the next records are kept, bool `[num_records]`; depends only on their places and `key`."""
    shares = np.ones(num_records)
    begin = 0
    for stretch in stretches:
        shares[begin : begin + stretch.length] = stretch.kept
        begin += stretch.length
    if not ((shares > 0) & (shares < 1)).any():
        return shares > 0
    numbers = np.arange(place.record, place.record + num_records, dtype=np.uint64)
    return _uniform(numbers, zlib.crc32(f"{key} {place.unit}".encode())) < shares


def keep_newest(stretches: Stretches, waiting: int, limit: int) -> Stretches:
    """Leave out the oldest of the waiting records."""
    return _left_out(stretches, waiting, limit, oldest=True)


def keep_oldest(stretches: Stretches, waiting: int, limit: int) -> Stretches:
    """Leave out the newest of the waiting records; those that come later are kept as there is room."""
    return _left_out(stretches, waiting, limit, oldest=False)


def sample(stretches: Stretches, waiting: int, limit: int) -> Stretches:
    """Keep a random sample of the waiting records."""
    share = limit / max(num_kept(stretches, waiting), 1)
    return tuple(Stretch(length, kept * min(share, 1.0)) for length, kept in _over(stretches, waiting))


Policy = Callable[[Stretches, int, int], Stretches]

POLICIES: Final[Mapping[str, Policy]] = {"newest": keep_newest, "oldest": keep_oldest, "sample": sample}
"""How the records that wait become at most so many: called with the stretches, how many records wait, and
the limit."""


def shares_of(limit: int, kept: Mapping[str, int]) -> dict[str, int]:
    """Divide a limit among partitions, in proportion to what waits in each; together at most `limit`."""
    total = sum(kept.values())
    return {name: limit * each // total if total else 0 for name, each in kept.items()}


def _left_out(stretches: Stretches, waiting: int, limit: int, *, oldest: bool) -> Stretches:
    """Leave out whole records from one end of the waiting ones until `limit` are kept."""
    over = list(_over(stretches, waiting))
    keeps: list[Stretch] = []
    room = float(limit)
    for length, kept in reversed(over) if oldest else over:
        whole = length if not kept else min(length, int(room / kept))
        room -= whole * kept
        pieces = [Stretch(whole, kept), Stretch(length - whole, 0.0)]
        keeps += [piece for piece in pieces if piece.length]
    return _merged(reversed(keeps) if oldest else keeps)


def _over(stretches: Stretches, waiting: int) -> list[Stretch]:
    """The stretches of exactly the next `waiting` records."""
    found, left = [], waiting
    for stretch in stretches:
        length = min(stretch.length, left)
        left -= length
        if length:
            found.append(Stretch(length, stretch.kept))
    return [*found, Stretch(left, 1.0)] if left else found


def _merged(stretches: Iterable[Stretch]) -> Stretches:
    merged: list[Stretch] = []
    for stretch in stretches:
        if merged and merged[-1].kept == stretch.kept:
            merged[-1] = Stretch(merged[-1].length + stretch.length, stretch.kept)
        else:
            merged.append(stretch)
    return tuple(merged)


def _uniform(numbers: NDArray[np.uint64], key: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of `numbers`, by SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(key << 32 | key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) / 2.0**53
