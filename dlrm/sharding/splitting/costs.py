"""Bytes that each strategy sends, from every rank to every other: pure functions, no tensors.

A strategy is a list of `Collective`s, in the order in which a step makes them. They are counted as the ranks
send them: an all-to-all as what goes from rank to rank, an all-reduce as a ring. What stays on a rank costs
nothing. `splitting.wire` counts the same on running ranks; tests hold both equal.

Symbols: `N` ranks with `b` samples each, `B = N b`; a head with `T` tables of `k` columns; `out` numbers a
sample that a split sums. With even ranks and fp32, a rank sends in one step, both ways together:

- exchange (all-to-all of pooled embeddings): `2 (N-1)/N b T k 4` [derived, communication.md H]
- split by tables or columns: `2 (N-1) b out 4`, what the DES paper's all-reduce of `B out` numbers costs:
  reduce-scatter forward, all-gather backward [paper: the idea; derived: the count]
- pull and push of unique rows: `(2 U k 4 + U 8) (N-1)/N`; a parameter server holds each row on one rank,
  needs the keys of `U` rows to hand them out, and remembers them until gradients come back [derived]

`out` is 1 for the linear part, `k + 1` for the factorization machine, the layer's width for a first fully
connected layer [paper], and `(T+1) T / 2` for the dot interaction, the rank for a cross layer [derived].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Way = Literal["sum_to_owners", "sum_to_replicas", "sum_to_all", "deal_columns"]
ID_BYTES: Final = 8
"""Of an id, and of a bag's length: both travel as int64."""
FP32_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One call of `Exchange` in a step, and its gradient's way back."""

    way: Way
    width: int
    """Numbers a sample."""
    value_bytes: int = FP32_BYTES
    """Of a number, where no other wire dtype is asked for."""


@dataclass(frozen=True, kw_only=True)
class SplitTraffic:
    """What a head moves when it is split."""

    crossings: tuple[Crossing, ...]
    replicated: int = 0
    """Numbers of the operator's weights that stay on all ranks, whose gradients are averaged in fp32."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What ranks send each other at once."""

    name: str
    sent: tuple[tuple[float, ...], ...]
    """`sent[r][q]` bytes from rank r to rank q; 0 where they are the same."""
    hops: int = 1
    """Messages that wait for each other."""

    def sent_by(self, rank: int) -> float:
        """Bytes that leave a rank."""
        return sum(self.sent[rank])


def most_sent(collectives: Sequence[Collective]) -> float:
    """Bytes a step of the rank that sends most."""
    if not collectives:
        return 0.0
    num_ranks = len(collectives[0].sent)
    return max(sum(each.sent_by(rank) for each in collectives) for rank in range(num_ranks))


def _collective(name: str, sent: Sequence[Sequence[float]], hops: int = 1) -> Collective:
    rows = [
        tuple(float(value) if target != rank else 0.0 for target, value in enumerate(row))
        for rank, row in enumerate(sent)
    ]
    return Collective(name=name, sent=tuple(rows), hops=hops)


def _forward_and_back(name: str, forward: Sequence[Sequence[float]]) -> list[Collective]:
    """A collective whose gradient takes the same way back."""
    back = list(zip(*forward, strict=True))
    return [_collective(f"{name}, forward", forward), _collective(f"{name}, backward", back)]


def pooled_exchange(
    widths: Sequence[float], batch_sizes: Sequence[int], value_bytes: float = FP32_BYTES
) -> list[Collective]:
    """All-to-all of pooled embeddings: the owner of columns sends every rank those of its samples.

    Args:
        widths: columns of pooled embeddings that each rank looks up.
        batch_sizes: samples of each rank.
        value_bytes: of a number.
    """
    forward = [[width * batch * value_bytes for batch in batch_sizes] for width in widths]
    return _forward_and_back("pooled embeddings", forward)


def crossing(
    each: Crossing,
    batch_sizes: Sequence[int],
    columns: Sequence[float],
    wire_bytes: int | None = None,
    ranks_per_node: int = 1,
) -> list[Collective]:
    """Forward and backward of one crossing.

    Args:
        each: what crosses.
        batch_sizes: samples of each rank.
        columns: of the dealt columns, the share of each rank; used by `deal_columns` alone.
        wire_bytes: of a number on its way; None: as it is.
        ranks_per_node: more than one: `two_level`.
    """
    size = each.value_bytes if wire_bytes is None else wire_bytes
    num_ranks = len(batch_sizes)
    if each.way == "deal_columns":
        dealt = [[batch * width * size for width in columns] for batch in batch_sizes]
        return _forward_and_back("dense columns", dealt)
    if each.way == "sum_to_owners":
        if ranks_per_node > 1:
            return two_level(each, batch_sizes, ranks_per_node, wire_bytes)
        summed = [[each.width * batch * size for batch in batch_sizes]] * num_ranks
        return _forward_and_back("partial sums", summed)
    times = 2 if each.way == "sum_to_all" else 1  # gradients are summed as well
    if size >= FP32_BYTES:
        return times * all_reduce(each.width * sum(batch_sizes), num_ranks, size)
    # what is rounded is not added up on its way: each rank sums a share, and sends it to all
    share, more = divmod(each.width * sum(batch_sizes), num_ranks)
    shares = [share + (rank < more) for rank in range(num_ranks)]
    numbers = replace(each, way="sum_to_owners", width=1)
    return times * crossing(numbers, shares, (), wire_bytes, ranks_per_node)


def two_level(
    each: Crossing, batch_sizes: Sequence[int], ranks_per_node: int, wire_bytes: int | None = None
) -> list[Collective]:
    """A `sum_to_owners` in two: sums inside each node first, so that a node sends each number on only once.

    Between nodes that is `1 / ranks_per_node` of the bytes of the sum in one [derived].

    Args:
        each: what crosses.
        batch_sizes: samples of each rank.
        ranks_per_node: a divisor of the number of ranks.
        wire_bytes: as in `crossing`.
    """
    size = each.width * (each.value_bytes if wire_bytes is None else wire_bytes)
    ranks = range(len(batch_sizes))
    inside = [
        [
            sum(batch_sizes[target % ranks_per_node :: ranks_per_node]) * size
            if rank // ranks_per_node == target // ranks_per_node
            else 0.0
            for target in ranks
        ]
        for rank in ranks
    ]
    between = [
        [batch_sizes[target] * size if (target - rank) % ranks_per_node == 0 else 0.0 for target in ranks]
        for rank in ranks
    ]
    first, last = _forward_and_back("sums inside a node", inside)
    second, third = _forward_and_back("sums between nodes", between)
    return [first, second, third, last]


def all_reduce(numbers: float, num_ranks: int, value_bytes: int = FP32_BYTES) -> list[Collective]:
    """A ring: every rank sends `2 (N-1)/N` of what is summed, to its neighbour."""
    if num_ranks == 1 or not numbers:
        return []
    share = 2 * (num_ranks - 1) / num_ranks * numbers * value_bytes
    sent = [
        [share if target == (rank + 1) % num_ranks else 0.0 for target in range(num_ranks)]
        for rank in range(num_ranks)
    ]
    return [_collective("all-reduce", sent, hops=2 * (num_ranks - 1))]


def input_exchange(
    bags: Sequence[float], ids: Sequence[float], batch_sizes: Sequence[int]
) -> list[Collective]:
    """The ids of all samples, and how many each bag has, to the ranks that look them up.

    Whole tables are looked up on one rank; a table's columns on each rank that has some.

    Args:
        bags: that each rank looks up for one sample.
        ids: in those bags together, on average.
        batch_sizes: samples of each rank.
    """
    return [
        _collective(name, [[batch * each * ID_BYTES for each in to_each] for batch in batch_sizes])
        for name, to_each in (("lengths of bags", bags), ("ids", ids))
    ]


def pull_and_push(
    unique_rows: Sequence[float], dims: Sequence[int], num_ranks: int, value_bytes: int = FP32_BYTES
) -> float:
    """Bytes a step that leave a rank which is a worker and a parameter server at once.

    It asks the others for the unique rows of its own samples by key and sends their gradients back; they ask
    it for as many. A share `1 / N` of all rows is its own.

    Args:
        unique_rows: different rows of each table among a rank's samples.
        dims: columns of each table.
        num_ranks: workers, each a server of its share of the rows.
        value_bytes: of a number.
    """
    keys = sum(unique_rows) * ID_BYTES
    values = sum(rows * dim for rows, dim in zip(unique_rows, dims, strict=True)) * value_bytes
    return (keys + 2 * values) * (num_ranks - 1) / num_ranks
