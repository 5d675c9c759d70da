"""Bytes that each strategy sends, from every rank to every other: pure functions without tensors.

A strategy is a list of `CollectiveBytes` in the order of a step. They are counted as sent: an all-to-all as
what goes from rank to rank, an all-reduce as a ring; what stays on a rank is free. `splitting.wire` counts
the same on running ranks, and tests compare both.

Symbols: `N` ranks with `b` samples each, `B = N b`; a head with `T` tables of `k` columns; `out` numbers a
sample that a split sums. With even ranks and fp32, a rank sends in one step, both ways together:

- exchange (all-to-all of pooled embeddings): `2 (N-1)/N b T k 4` [derived, communication.md H]
- split by tables or columns: `2 (N-1) b out 4`, as the DES paper's all-reduce of `B out` numbers:
  reduce-scatter forward, all-gather backward [paper: the idea; derived: the count]
- pull and push of unique rows: `(2 U k 4 + U 8) (N-1)/N`; a parameter server holds each row on one rank, gets
  the keys of `U` rows, and remembers them until the gradients come back [derived]

`out` is 1 for the linear part, `k + 1` for the factorization machine, the layer's width for a first fully
connected layer [paper], `(T+1) T / 2` for the dot interaction, and the rank for a cross layer [derived].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Way = Literal["sum_to_owners", "sum_to_all", "deal_columns"]
ID_BYTES: Final = 8
"""Bytes of an id and of a bag's length, which both travel as int64."""
FP32_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One call of `SplitExchange` in a step, and the way back of its gradient."""

    way: Way
    width: int
    """Numbers per sample."""
    value_bytes: int = FP32_BYTES
    """Bytes of a number if no wire dtype is set."""


@dataclass(frozen=True, kw_only=True)
class SplitTraffic:
    """What a head sends when it is split."""

    crossings: tuple[Crossing, ...]
    replicated: int = 0
    """Number of operator weights that stay on all ranks; their gradients are averaged in fp32."""


@dataclass(frozen=True, kw_only=True)
class CollectiveBytes:
    """Bytes that ranks send each other in one collective."""

    name: str
    sent: tuple[tuple[float, ...], ...]
    """`sent[r][q]` is the bytes from rank r to rank q, with `sent[r][r] == 0`."""
    hops: int = 1
    """Number of messages that wait for each other."""

    def sent_by(self, rank: int) -> float:
        """Bytes that leave a rank."""
        return sum(self.sent[rank])


def most_sent(collectives: Sequence[CollectiveBytes]) -> float:
    """Bytes per step of the rank that sends most."""
    if not collectives:
        return 0.0
    num_ranks = len(collectives[0].sent)
    return max(sum(each.sent_by(rank) for each in collectives) for rank in range(num_ranks))


def _collective(name: str, sent: Sequence[Sequence[float]], hops: int = 1) -> CollectiveBytes:
    rows = [
        tuple(float(value) if target != rank else 0.0 for target, value in enumerate(row))
        for rank, row in enumerate(sent)
    ]
    return CollectiveBytes(name=name, sent=tuple(rows), hops=hops)


def _forward_and_back(name: str, forward: Sequence[Sequence[float]]) -> list[CollectiveBytes]:
    """Return a collective and that of its gradient, in which each rank sends back what it received.

    `forward[r][q]` is the bytes from rank r to rank q.
    """
    back = list(zip(*forward, strict=True))
    return [_collective(f"{name}, forward", forward), _collective(f"{name}, backward", back)]


def pooled_exchange(
    widths: Sequence[float], batch_sizes: Sequence[int], value_bytes: float = FP32_BYTES
) -> list[CollectiveBytes]:
    """All-to-all of pooled embeddings, of which each rank looks up `widths` columns for all samples."""
    forward = [[width * batch * value_bytes for batch in batch_sizes] for width in widths]
    return _forward_and_back("pooled embeddings", forward)


def crossing(
    each: Crossing,
    batch_sizes: Sequence[int],
    columns: Sequence[float],
    wire_bytes: int | None = None,
    ranks_per_node: int = 1,
) -> list[CollectiveBytes]:
    """Collectives of one crossing, forward and backward.

    `columns` are those of each rank for `deal_columns`; `wire_bytes` is the size of a number while it travels
    (None: as computed); with more than one of `ranks_per_node`, sums are made in two levels.
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
    # twice each, because gradients are summed on all ranks as well
    if size >= FP32_BYTES:
        return 2 * all_reduce(each.width * sum(batch_sizes), num_ranks, size)
    # an all-reduce would round each partial sum: instead each rank sums a share in fp32, and sends it to all
    share, more = divmod(each.width * sum(batch_sizes), num_ranks)
    shares = [share + (rank < more) for rank in range(num_ranks)]
    numbers = replace(each, way="sum_to_owners", width=1)
    return 2 * crossing(numbers, shares, (), wire_bytes, ranks_per_node)


def two_level(
    each: Crossing, batch_sizes: Sequence[int], ranks_per_node: int, wire_bytes: int | None = None
) -> list[CollectiveBytes]:
    """A `sum_to_owners` that sums inside each node first, so that a node sends each number only once.

    Between nodes that is `1 / ranks_per_node` of the bytes of a flat sum [derived]. `ranks_per_node` must
    divide the number of ranks; the other arguments are as in `crossing`.
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


def all_reduce(numbers: float, num_ranks: int, value_bytes: int = FP32_BYTES) -> list[CollectiveBytes]:
    """Ring all-reduce: every rank sends `2 (N-1)/N` of the summed bytes to its neighbour."""
    if num_ranks == 1 or not numbers:
        return []
    share = 2 * (num_ranks - 1) / num_ranks * numbers * value_bytes
    sent = [
        [share if target == (rank + 1) % num_ranks else 0.0 for target in range(num_ranks)]
        for rank in range(num_ranks)
    ]
    return [_collective("all-reduce", sent, hops=2 * (num_ranks - 1))]


def input_exchange(
    bags: Sequence[float], ids: Sequence[float], batch_sizes: Sequence[int], *, is_weighted: bool = False
) -> list[CollectiveBytes]:
    """The ids of all samples and the lengths of their bags, sent to the ranks that look them up.

    `bags` and `ids` are the numbers per sample that each rank looks up: a whole table on one rank, a table
    cut by columns on each rank that has some. The weights of ids travel with them, in fp32.
    """
    sent = [("lengths of bags", bags, ID_BYTES), ("ids", ids, ID_BYTES)]
    if is_weighted:
        sent.append(("weights of ids", ids, FP32_BYTES))
    return [
        _collective(name, [[batch * each * size for each in to_each] for batch in batch_sizes])
        for name, to_each, size in sent
    ]


def pull_and_push(
    unique_rows: Sequence[float], dims: Sequence[int], num_ranks: int, value_bytes: int = FP32_BYTES
) -> float:
    """Bytes per step that leave a rank which is a worker and a parameter server at once.

    The rank requests the unique rows of its samples (`unique_rows` by table, with `dims` columns) from the
    other ranks by key, and sends their gradients back; the others request as many. A share `1 / num_ranks` of
    all rows is its own.
    """
    keys = sum(unique_rows) * ID_BYTES
    values = sum(rows * dim for rows, dim in zip(unique_rows, dims, strict=True)) * value_bytes
    return (keys + 2 * values) * (num_ranks - 1) / num_ranks
