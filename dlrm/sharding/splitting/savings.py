"""What splitting a whole model saves, in bytes a step and rank, by the formulas of `costs`.

Two baselines: the all-to-all of pooled embeddings, which is TorchRec's, and pulling and pushing unique rows,
which is a parameter server's and the one that the DES paper compares with (72.26 % to 99.77 % less by its
theory [paper, first version]). Tables lie evenly over the ranks, and numbers are fp32. Gradients of an
operator's own weights, which a split keeps in place, are averaged once a step in both baselines; dense
weights that are replicated either way are left out. So are ids, except for a parameter server's keys, which
come with its rows: DES reads features where their keys live, and TorchRec sends ids with either plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dlrm.models.linear import LinearHead
from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.shapes import heads_of, numbers_outside_tables


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that leave a rank in a step; where ranks differ, the rank that sends most."""

    split: float
    all_to_all: float
    pull_and_push: float

    @property
    def saved(self) -> float:
        """Share of the bytes of pulling and pushing unique rows that splitting saves; below 0: it costs."""
        return 1 - self.split / self.pull_and_push

    @property
    def saved_a2a(self) -> float:
        """Share of the bytes of the all-to-all that splitting saves; below 0: it costs."""
        return 1 - self.split / self.all_to_all


def traffic_of(model: nn.Module, num_ranks: int, batch_size: int, unique_rows: Sequence[float]) -> Traffic:
    """Of all heads of a model together.

    Args:
        model: unsharded, each of whose heads can be split.
        num_ranks: that train it.
        batch_size: samples of each rank.
        unique_rows: different ids of each feature among a rank's samples, in canonical order.
    """
    heads = [head for head in heads_of(model).values() if isinstance(head, Head)]
    each = [_of_head(head, num_ranks, batch_size, unique_rows) for head in heads]
    return Traffic(
        split=sum(one.split for one in each),
        all_to_all=sum(one.all_to_all for one in each),
        pull_and_push=sum(one.pull_and_push for one in each),
    )


def _of_head(head: Head, num_ranks: int, batch_size: int, unique_rows: Sequence[float]) -> Traffic:
    sizes, traffic = [batch_size] * num_ranks, head.traffic()
    tables = head.tables.embedding_bag_configs()
    dim = tables[0].embedding_dim
    in_place = numbers_outside_tables(head) - traffic.replicated
    averaged = costs.most_sent(costs.all_reduce(in_place, num_ranks))
    exchanged = costs.pooled_exchange([len(tables) * dim / num_ranks] * num_ranks, sizes)
    # a dense vector that takes part goes to some rank whole, or in even columns: most leaves a rank without
    columns = [dim / num_ranks] * num_ranks if head.split_by == "columns" else [0.0] * (num_ranks - 1) + [dim]
    moved = [
        collective
        for crossing in traffic.crossings
        for collective in costs.crossing(crossing, sizes, columns, costs.FP32_BYTES)
    ]
    # TorchRec's tables have more columns than a linear part has weights, a parameter server's do not
    weight_dim = 1 if isinstance(head, LinearHead) else dim
    rows = costs.pull_and_push(unique_rows, [weight_dim] * len(tables), num_ranks)
    return Traffic(
        split=costs.most_sent(moved),
        all_to_all=costs.most_sent(exchanged) + averaged,
        pull_and_push=rows + averaged,
    )
