"""Bytes of a step by the formulas of `dlrm.sharding.splitting`, and what was counted held against them.

For `experiments.splitting`. Batches are cut evenly into one part for each rank. Different rows are counted in
the batches themselves, in tables of Criteo Terabyte's size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from math import isclose
from statistics import mean
from typing import Any, Final

import numpy as np
from torch import nn

from dlrm.comm.consistency.error_flags import NUM_FLAGS
from dlrm.launch.device import Ranks
from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning.savings import id_traffic_of, traffic_of
from dlrm.sharding.splitting.planning.shapes import heads_of, numbers_outside_tables
from experiments.harness.record import Row
from experiments.harness.training import NUM_SCALARS
from experiments.splitting.counting import table_dims
from experiments.splitting.workload import BAGS, Workload

HASHED: Final = 0.02
"""By how much a parameter server's bytes may differ from the formula, whose rows lie evenly over the ranks;
hashed ones do so nearly."""


def formulas(model: str, num_ranks: int, workload: Workload) -> Row:
    """What a rank sends in a step, without what is the same under every plan."""
    unsharded, batch_size = workload.unsharded(model), workload.global_batch_size // num_ranks
    unique = {bags: unique_rows(workload, bags, num_ranks) for bags in BAGS}
    found = {bags: traffic_of(unsharded, num_ranks, batch_size, rows) for bags, rows in unique.items()}
    return {
        "model": model,
        "workers": num_ranks,
        "split": found["one_hot"].split,
        "all_to_all": found["one_hot"].all_to_all,
        "pull_and_push": {bags: traffic.pull_and_push for bags, traffic in found.items()},
        "unique_rows": {bags: sum(rows) for bags, rows in unique.items()},
    }


def id_formulas(model: str, num_ranks: int, workload: Workload) -> Row:
    """Ids and bags' lengths that a rank sends in a step besides: a row of its own, for those without it."""
    unsharded, batch_size = workload.unsharded(model), workload.global_batch_size // num_ranks
    found = {bags: id_traffic_of(unsharded, num_ranks, batch_size, sum(each)) for bags, each in BAGS.items()}
    return {
        "model": model,
        "workers": num_ranks,
        "id_bytes": {bags: asdict(traffic) for bags, traffic in found.items()},
    }


@cache
def unique_rows(workload: Workload, bags: str, num_ranks: int) -> tuple[float, ...]:
    """Different rows of each table among a rank's samples, on average over ranks and batches."""
    counts = [
        [len(keys) for keys in workload.keys(number, bags, Ranks(rank, rank, num_ranks))]
        for number in range(workload.num_batches)
        for rank in range(num_ranks)
    ]
    return tuple(map(float, np.mean(counts, axis=0)))


def check(expected: Row, counted: Mapping[str, Any], workload: Workload) -> None:
    """Hold what was counted against the formulas.

    Embeddings under TorchRec's plan as the mean over ranks, since whole tables never lie quite evenly.

    Args:
        expected: from `formulas`.
        counted: from `splitting_counting.count`.
        workload: of both.

    Raises:
        RuntimeError: they differ.
    """
    model, num_ranks = expected["model"], expected["workers"]
    outside = replicated_bytes(workload.unsharded(model), num_ranks)
    pairs = {
        "split": (max(counted["des"]) - outside, expected["split"], 1e-9),
        "all-to-all": (mean(counted["torchrec"]) - outside, expected["all_to_all"], 1e-9),
    }
    for bags in BAGS:
        rows = unique_rows(workload, bags, num_ranks)
        sent = sum(
            costs.pull_and_push(rows, [dim] * len(rows), num_ranks) for dim in table_dims(model, workload)
        )
        pairs[f"pull and push, {bags}"] = (mean(counted["pull_and_push"][bags]), sent, HASHED)
    for name, (found, formula, tolerance) in pairs.items():
        if not isclose(found, formula, rel_tol=tolerance):
            raise RuntimeError(
                f"{model} on {num_ranks} ranks, {name}: {found:,.0f} bytes were counted, the formula says "
                f"{formula:,.0f}; one of dlrm/sharding/splitting/costs.py and wire.py is wrong"
            )


def replicated_bytes(unsharded: nn.Module, num_ranks: int) -> float:
    """Gradients that are averaged under every plan, and what travels with them: left out of savings."""
    numbers = NUM_SCALARS + NUM_FLAGS + numbers_outside_tables(unsharded)
    for head in heads_of(unsharded).values():
        assert isinstance(head, Head)
        numbers -= numbers_outside_tables(head) - head.traffic().replicated
    return costs.most_sent(costs.all_reduce(numbers, num_ranks))


def saved(row: Row, against: float, ids: Mapping[str, float] | None = None) -> float:
    """Share of bytes that the better of splitting and exchanging the whole model saves against a baseline.

    Args:
        row: from `formulas`.
        against: bytes of the baseline, those of its keys among them.
        ids: bytes of ids under each of the two plans, which then count as well; None: they do not.
    """
    sent = {plan: row[plan] + (ids[plan] if ids else 0) for plan in ("split", "all_to_all")}
    return float(1 - min(sent.values()) / against)


def rows_of(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """Those with formulas, by model and number of workers."""
    return {(row["model"], row["workers"]): row for row in rows if "split" in row}


def ids_of(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """Bytes of ids by plan for each kind of bags, by model and number of workers."""
    return {(row["model"], row["workers"]): row["id_bytes"] for row in rows if "id_bytes" in row}
