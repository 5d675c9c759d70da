"""Compares the strategies of each head by bytes and estimated time on one cluster, and chooses.

Pure functions of shapes and measured speeds; `planner` applies the choice. The strategy `two_level` sums
inside nodes first; the module `two_level` derives why no exchange between nodes is offered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.costs import CollectiveBytes, Crossing, SplitTraffic
from dlrm.sharding.splitting.planning.cluster import Cluster

Strategy = Literal["exchange", "split", "rows", "two_level"]
"""Strategy of a head: TorchRec's exchange of pooled embeddings; the split that the head is made for; its
tables split by rows; the split with sums inside each node first."""
TIE: Final = 0.02
"""Estimated times that differ by less than this share count as equal."""
CLEARLY: Final = 0.01
"""Share of a step's time by which a trial must beat the ordinary plan."""
NO_SPLIT: Final = "its operator has no split"
PASSES: Final = 8
"""How often a split reads or writes its partial results: made, packed, summed and used, with gradients."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Bytes and counts of a head on which its costs depend; numbers by rank are per sample."""

    path: str
    """Path in the model."""
    num_tables: int
    dim: int
    """Columns of each table."""
    value_bytes: int
    """Bytes of a number of a pooled embedding as computed."""
    ids: float
    """Mean number per sample for all features together."""
    is_weighted: bool = False
    """Whether a weight travels with each id."""
    widths: tuple[int, ...]
    """Under the ordinary plan: columns of pooled embeddings that each rank looks up for all samples."""
    bags: tuple[float, ...]
    """Under the ordinary plan: bags that each rank looks up."""
    looked_up: tuple[float, ...]
    """Under the ordinary plan: ids in those bags."""
    replicated: int
    """Under the ordinary plan: numbers of small tables, whose gradients are averaged."""
    exchanged_bytes: float | None = None
    """Bytes of a number of a pooled embedding when TorchRec exchanges it; None: as computed."""
    weights: int = 0
    """Number of operator weights, whose gradients are averaged unless the head is split."""
    traffic: SplitTraffic | None = None
    """Traffic when split; None: the operator cannot be split."""
    split_bags: tuple[float, ...] = ()
    """Like `bags`, when split."""
    split_ids: tuple[float, ...] = ()
    """Like `looked_up`, when split."""
    columns: tuple[int, ...] = ()
    """Columns of the dense vector on each rank when split."""
    partial_rows: bool = False
    """Whether the operator can be split with its tables by rows; if not, pooled embeddings are summed."""
    refusal: str = ""
    """Why the head cannot be split here."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One strategy of a head on a cluster, with its cost."""

    strategy: Strategy
    values: tuple[CollectiveBytes, ...] = ()
    inputs: tuple[CollectiveBytes, ...] = ()
    time_s: float = float("inf")
    illegal: str = ""
    """Why the strategy is not possible; empty if it is."""

    @property
    def value_bytes(self) -> float:
        """Bytes of embeddings, partial results and gradients that leave the busiest rank in a step."""
        return costs.most_sent(self.values)

    @property
    def id_bytes(self) -> float:
        """Bytes of ids and bag lengths that leave the busiest rank in a step."""
        return costs.most_sent(self.inputs)


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """The strategy of a head and why."""

    path: str
    strategy: Strategy
    reason: str
    options: tuple[Option, ...] = ()
    """The strategies that were compared."""


def options(
    shape: HeadShape, cluster: Cluster, batch_sizes: Sequence[int], wire_bytes: int | None = None
) -> tuple[Option, ...]:
    """All strategies of a head, the ordinary one first.

    `wire_bytes` is the size of a number of partial results.
    """
    numbers = all_reduced(shape.replicated + shape.weights, cluster.num_ranks)
    value_bytes = shape.exchanged_bytes or shape.value_bytes
    exchanged = [*costs.pooled_exchange(shape.widths, batch_sizes, value_bytes), *numbers]
    ordinary = _option(shape, "exchange", exchanged, (shape.bags, shape.looked_up), 0, cluster, batch_sizes)
    if shape.traffic is None or shape.refusal:
        refusal = shape.refusal or NO_SPLIT
        names: tuple[Strategy, ...] = ("split", "rows", "two_level")
        return (ordinary, *(Option(strategy=name, illegal=refusal) for name in names))
    return (
        ordinary,
        _split(shape, cluster, batch_sizes, wire_bytes, "split"),
        _rows(shape, cluster, batch_sizes, wire_bytes),
        _two_level(shape, cluster, batch_sizes, wire_bytes),
    )


def all_reduced(numbers: int, num_ranks: int) -> list[CollectiveBytes]:
    """Gradients averaged with those of all dense parameters: bytes without latency of their own."""
    return [
        CollectiveBytes(name="dense gradients", sent=each.sent, hops=0)
        for each in costs.all_reduce(numbers, num_ranks)
    ]


def choose_strategy(shape: HeadShape, compared: Sequence[Option]) -> HeadChoice:
    """The fastest strategy; the ordinary one if none is faster by more than a tie."""
    ordinary, *others = compared
    legal = [each for each in others if not each.illegal]
    strategy: Strategy = "exchange"
    if not legal:
        reason = others[0].illegal
    else:
        best = min(legal, key=lambda each: each.time_s)
        gain = 1 - best.time_s / ordinary.time_s
        if gain < TIE:
            more = "as good as no less" if gain >= -TIE else f"{-gain:.0%} more"
            reason = f"{best.strategy} would take {more} time"
        else:
            fewer = 1 - (best.value_bytes + best.id_bytes) / (ordinary.value_bytes + ordinary.id_bytes)
            sends = f"{abs(fewer):.0%} {'fewer' if fewer >= 0 else 'more'} bytes"
            strategy, reason = best.strategy, f"{gain:.0%} less time and {sends} than the exchange"
    return HeadChoice(path=shape.path, strategy=strategy, reason=reason, options=tuple(compared))


def candidates(choices: Sequence[HeadChoice]) -> list[dict[str, Strategy]]:
    """Strategies of all heads that are worth a trial.

    Nothing split, everything split, and the estimated best.
    """
    nothing: dict[str, Strategy] = {each.path: "exchange" for each in choices}
    everything: dict[str, Strategy] = {each.path: _best_split(each) for each in choices}
    chosen = {each.path: each.strategy for each in choices}
    found: list[dict[str, Strategy]] = []
    for strategies in (nothing, everything, chosen):
        if strategies not in found:
            found.append(strategies)
    return found


def _best_split(choice: HeadChoice) -> Strategy:
    legal = [each for each in choice.options if not each.illegal and each.strategy != "exchange"]
    return min(legal, key=lambda each: each.time_s).strategy if legal else "exchange"


def fastest(
    choices: Sequence[HeadChoice], tried: Sequence[Mapping[str, Strategy]], times_s: Sequence[float]
) -> list[HeadChoice]:
    """Choices of the trial that took the least time; the ordinary plan if none is clearly faster.

    `tried` are strategies by head path, the ordinary ones first.
    """
    best = min(range(len(tried)), key=lambda each: times_s[each])
    if times_s[best] > (1 - CLEARLY) * times_s[0]:
        best = 0
    others = ", ".join(
        f"{time_s * 1e3:.1f} ms with {_in_words(strategies)}"
        for place, (strategies, time_s) in enumerate(zip(tried, times_s, strict=True))
        if place != best
    )
    reason = f"tried: a step took {times_s[best] * 1e3:.1f} ms, and {others}"
    return [replace(each, strategy=tried[best][each.path], reason=reason) for each in choices]


def _in_words(strategies: Mapping[str, Strategy]) -> str:
    return " and ".join(f"{path} {strategy}" for path, strategy in strategies.items())


def _split(
    shape: HeadShape,
    cluster: Cluster,
    batch_sizes: Sequence[int],
    wire_bytes: int | None,
    strategy: Strategy,
    ranks_per_node: int = 1,
) -> Option:
    assert shape.traffic is not None
    crossings = shape.traffic.crossings
    values = [
        each
        for one in crossings
        for each in costs.crossing(one, batch_sizes, shape.columns, wire_bytes, ranks_per_node)
    ]
    values += all_reduced(shape.traffic.replicated, cluster.num_ranks)
    inputs = (shape.split_bags, shape.split_ids)
    return _option(shape, strategy, values, inputs, _handled(crossings), cluster, batch_sizes)


def _rows(shape: HeadShape, cluster: Cluster, batch_sizes: Sequence[int], wire_bytes: int | None) -> Option:
    """Every rank has some rows of every table: it gets all bags, and the ids whose rows it has."""
    assert shape.traffic is not None
    num_ranks = cluster.num_ranks
    pooled = Crossing(way="sum_to_owners", width=shape.num_tables * shape.dim, value_bytes=shape.value_bytes)
    if shape.partial_rows:
        crossings, averaged = shape.traffic.crossings, shape.traffic.replicated
    else:
        crossings, averaged = (pooled,), shape.weights
    values = [each for one in crossings for each in costs.crossing(one, batch_sizes, (), wire_bytes)]
    values += all_reduced(averaged, num_ranks)
    inputs = ([float(shape.num_tables)] * num_ranks, [shape.ids / num_ranks] * num_ranks)
    return _option(shape, "rows", values, inputs, _handled(crossings), cluster, batch_sizes)


def _two_level(
    shape: HeadShape, cluster: Cluster, batch_sizes: Sequence[int], wire_bytes: int | None
) -> Option:
    if cluster.num_nodes == 1 or cluster.ranks_per_node == 1:
        why = "one node" if cluster.num_nodes == 1 else "one rank a node"
        return Option(strategy="two_level", illegal=f"there is {why}")
    return _split(shape, cluster, batch_sizes, wire_bytes, "two_level", cluster.ranks_per_node)


def _handled(crossings: Sequence[Crossing]) -> int:
    """Bytes per sample of partial results in the memory of each rank."""
    return sum(each.width * each.value_bytes for each in crossings)


def _option(
    shape: HeadShape,
    strategy: Strategy,
    values: Sequence[CollectiveBytes],
    inputs: tuple[Sequence[float], Sequence[float]],
    handled: int,
    cluster: Cluster,
    batch_sizes: Sequence[int],
) -> Option:
    bags, ids = inputs
    exchanged = costs.input_exchange(bags, ids, batch_sizes, is_weighted=shape.is_weighted)
    samples = sum(batch_sizes)
    compute_s = samples * (max(ids) * cluster.s_per_id + PASSES * handled / cluster.memory_bytes_per_s)
    transfer_s = sum(map(cluster.time_s, [*values, *exchanged]))
    return Option(
        strategy=strategy, values=tuple(values), inputs=tuple(exchanged), time_s=transfer_s + compute_s
    )


def format_choices(choices: Sequence[HeadChoice], cluster: Cluster) -> str:
    """Format the compared strategies, the choices and their reasons as a table for people."""
    lines = [
        f"strategies on {cluster.describe()}; bytes that the busiest rank sends in a step, estimated time:",
        f"{'head':<10} {'strategy':<10} {'values':>10} {'ids':>10} {'time':>10}",
    ]
    for choice in choices:
        for each in choice.options:
            lines.append(f"{choice.path:<10} {each.strategy:<10} {_cells(each)}{_mark(choice, each)}")
    return "\n".join(lines)


def _cells(option: Option) -> str:
    if option.illegal:
        return f"not possible: {option.illegal}"
    sent = [f"{each / 1e3:,.1f} kB" for each in (option.value_bytes, option.id_bytes)]
    return f"{sent[0]:>10} {sent[1]:>10} {option.time_s * 1e3:>7.2f} ms"


def _mark(choice: HeadChoice, option: Option) -> str:
    return f"  <- {choice.reason}" if option.strategy == choice.strategy else ""
