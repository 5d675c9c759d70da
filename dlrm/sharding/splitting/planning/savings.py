"""Bytes per step and rank that splitting a whole model saves, by the formulas of `costs`.

There are two baselines: TorchRec's all-to-all of pooled embeddings, and a parameter server's pull and push of
unique rows, with which the DES paper compares (72.26 % to 99.77 % less by its theory [paper, first version]).
Tables lie evenly over the ranks, and numbers are fp32. Gradients of an operator's own weights, which a split
keeps in place, are averaged once a step in both baselines; dense weights that are replicated either way are
left out. `traffic_of` leaves out ids, except for a parameter server's keys: the DES paper's convention, in
which features are read where their keys live. Here TorchRec sends ids and bag lengths with either plan, 8
bytes each; `id_traffic_of` counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning.shapes import heads_of, numbers_outside_tables


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that leave a rank in a step; where ranks differ, the rank that sends most."""

    split: float
    all_to_all: float
    pull_and_push: float


@dataclass(frozen=True, kw_only=True)
class IdTraffic:
    """Bytes of ids and bag lengths that leave a rank in a step."""

    split: float
    all_to_all: float


def traffic_of(model: nn.Module, num_ranks: int, batch_size: int, unique_rows: Sequence[float]) -> Traffic:
    """Traffic of all heads of an unsharded model together, each of which can be split.

    `unique_rows` are the different ids of each feature among a rank's samples, in canonical order.
    """
    heads = [head for head in heads_of(model).values() if isinstance(head, Head)]
    each = [_of_head(head, num_ranks, batch_size, unique_rows) for head in heads]
    return Traffic(
        split=sum(one.split for one in each),
        all_to_all=sum(one.all_to_all for one in each),
        pull_and_push=sum(one.pull_and_push for one in each),
    )


def id_traffic_of(model: nn.Module, num_ranks: int, batch_size: int, ids: float) -> IdTraffic:
    """Id traffic of all heads of an unsharded model; each head gets the ids of its tables separately.

    `ids` is the number per sample for all features together. A head split by columns needs all ids on every
    rank; other heads are sent each id once.
    """
    heads = [head for head in heads_of(model).values() if isinstance(head, Head)]
    return IdTraffic(
        split=sum(
            _of_inputs(head, num_ranks, batch_size, ids, everywhere=head.split_by == "columns")
            for head in heads
        ),
        all_to_all=sum(_of_inputs(head, num_ranks, batch_size, ids, everywhere=False) for head in heads),
    )


def _of_inputs(head: Head, num_ranks: int, batch_size: int, ids: float, everywhere: bool) -> float:
    share = 1 if everywhere else 1 / num_ranks
    bags, looked_up = ([share * each] * num_ranks for each in (len(head.names), ids))
    return costs.most_sent(costs.input_exchange(bags, looked_up, [batch_size] * num_ranks))


def _of_head(head: Head, num_ranks: int, batch_size: int, unique_rows: Sequence[float]) -> Traffic:
    sizes, traffic = [batch_size] * num_ranks, head.traffic()
    tables = head.tables.embedding_bag_configs()
    dim = tables[0].embedding_dim
    in_place = numbers_outside_tables(head) - traffic.replicated
    averaged = costs.most_sent(costs.all_reduce(in_place, num_ranks))
    exchanged = costs.pooled_exchange([len(tables) * dim / num_ranks] * num_ranks, sizes)
    # the rank that gets none of the dense vector sends most of it
    columns = [dim / num_ranks] * num_ranks if head.split_by == "columns" else [0.0] * (num_ranks - 1) + [dim]
    moved = [
        collective
        for crossing in traffic.crossings
        for collective in costs.crossing(crossing, sizes, columns, costs.FP32_BYTES)
    ]
    # FBGEMM pads the linear part's tables to 4 columns; a parameter server would not
    weight_dim = head.weight_dim or dim
    rows = costs.pull_and_push(unique_rows, [weight_dim] * len(tables), num_ranks)
    return Traffic(
        split=costs.most_sent(moved),
        all_to_all=costs.most_sent(exchanged) + averaged,
        pull_and_push=rows + averaged,
    )
