"""Bytes of a step by the formulas of `dlrm.sharding.splitting`, and their comparison with counted bytes.

Batches are split evenly over the ranks. The unique rows are counted in the batches themselves, with tables of
Criteo Terabyte's size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from math import isclose
from statistics import mean

import numpy as np
from torch import nn

from dlrm.comm.consistency import NUM_FLAGS
from dlrm.launch.device import Ranks
from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning.savings import id_traffic_of, traffic_of
from dlrm.sharding.splitting.planning.shapes import heads_of, numbers_outside_tables
from experiments.harness.record import Row
from experiments.harness.training import NUM_SCALARS
from experiments.splitting.workload import BAGS, Workload


def formulas(model: str, num_ranks: int, workload: Workload) -> Row:
    """Bytes that a rank sends in a step, without those that are the same under every plan.

    `id_bytes` are those of ids and bag lengths.
    """
    unsharded, batch_size = workload.unsharded(model), workload.global_batch_size // num_ranks
    unique = {bags: unique_rows(workload, bags, num_ranks) for bags in BAGS}
    found = {bags: traffic_of(unsharded, num_ranks, batch_size, rows) for bags, rows in unique.items()}
    ids = {bags: id_traffic_of(unsharded, num_ranks, batch_size, sum(each)) for bags, each in BAGS.items()}
    return {
        "model": model,
        "workers": num_ranks,
        "split": found["one_hot"].split,
        "all_to_all": found["one_hot"].all_to_all,
        "pull_and_push": {bags: traffic.pull_and_push for bags, traffic in found.items()},
        "unique_rows": {bags: sum(rows) for bags, rows in unique.items()},
        "id_bytes": {bags: asdict(traffic) for bags, traffic in ids.items()},
    }


@cache
def unique_rows(workload: Workload, bags: str, num_ranks: int) -> tuple[float, ...]:
    """Unique rows of each table among a rank's samples, on average over ranks and batches."""
    counts = [
        [len(keys) for keys in workload.keys(number, bags, Ranks(rank, rank, num_ranks))]
        for number in range(workload.num_batches)
        for rank in range(num_ranks)
    ]
    return tuple(map(float, np.mean(counts, axis=0)))


def check(expected: Row, counted: Mapping[str, Sequence[float]], workload: Workload) -> None:
    """Compare counted bytes with the formulas.

    Under TorchRec's plan the mean over ranks counts, since whole tables cannot be quite even.

    Args:
        expected: from `formulas`.
        counted: bytes of every rank in rank order, by plan.
        workload: of both.

    Raises:
        RuntimeError: a counted value differs from its formula.
    """
    model, num_ranks = expected["model"], expected["workers"]
    outside = replicated_bytes(workload.unsharded(model), num_ranks)
    pairs = {
        "split": (max(counted["des"]) - outside, expected["split"]),
        "all-to-all": (mean(counted["torchrec"]) - outside, expected["all_to_all"]),
    }
    for name, (found, formula) in pairs.items():
        if not isclose(found, formula):
            raise RuntimeError(
                f"{model} on {num_ranks} ranks, {name}: {found:,.0f} bytes were counted, the formula says "
                f"{formula:,.0f}; one of dlrm/sharding/splitting/costs.py and wire.py is wrong"
            )


def replicated_bytes(unsharded: nn.Module, num_ranks: int) -> float:
    """Bytes of the all-reduce of dense gradients and flags, which every plan sends and savings leave out."""
    numbers = NUM_SCALARS + NUM_FLAGS + numbers_outside_tables(unsharded)
    for head in heads_of(unsharded).values():
        assert isinstance(head, Head)
        numbers -= numbers_outside_tables(head) - head.traffic().replicated
    return costs.most_sent(costs.all_reduce(numbers, num_ranks))


def saved(row: Row, against: float, ids: Mapping[str, float] | None = None) -> float:
    """Share of bytes that the better of splitting and exchanging the whole model saves against a baseline.

    Args:
        row: from `formulas`.
        against: bytes of the baseline, including its keys.
        ids: bytes of ids under each of the two plans, to count as well; None: without ids.
    """
    sent = {plan: row[plan] + (ids[plan] if ids else 0) for plan in ("split", "all_to_all")}
    return float(1 - min(sent.values()) / against)
