"""Chooses which heads are split, with the same result on all ranks.

`torchrec` splits none, `des` all that can be split. `auto` measures the cluster, compares all strategies of
every head by bytes and estimated time, and benchmarks the most promising on a small copy of the model, unless
the run folder has the choice of an earlier start (`saved_choice`).
"""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from dlrm.comm.autotune.candidates import slowest
from dlrm.comm.autotune.online_trial import LEAST_ROUNDS, running, typical
from dlrm.config.schema import Config
from dlrm.launch.device import of_rank_0
from dlrm.sharding.pooled import PooledFeatures
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning.cluster import Cluster, measure
from dlrm.sharding.splitting.planning.saved_choice import check_choice, load_choice, save_choice
from dlrm.sharding.splitting.planning.shapes import ONE_RANK, heads_of, shapes_of
from dlrm.sharding.splitting.planning.strategies import (
    NO_SPLIT,
    HeadChoice,
    HeadShape,
    Strategy,
    candidates,
    choose_strategy,
    fastest,
    format_choices,
    options,
)
from dlrm.sharding.splitting.planning.torchrec_plan import WIRE_DTYPES, ModelLayout, Planned

logger = logging.getLogger(__name__)

Trial = Callable[[Mapping[str, Strategy]], Callable[[], None]]
"""Maps strategies by head path to a training step under them, on a model like the run's."""

WARM_UP: Final = 3
"""Calls of each alternative before the first round, for memory and connections."""
CALLS: Final = 2
"""Timed calls of a turn; the untimed call before them warms the caches."""
MOST_ROUNDS: Final = 60
LASTS_S: Final = 15.0
"""Seconds after which no further round starts, once the least number of rounds is done."""

Alternative = Callable[[], None]


def plan_heads(
    model: nn.Module,
    layout: ModelLayout,
    batch_size: int,
    folder: Path | None = None,
    trial: Trial | None = None,
) -> Planned:
    """Choose the strategy of each head and plan accordingly; a collective.

    The choice is stored in the run's `folder` if given. `auto` benchmarks steps that `trial` makes; without
    it estimates decide. `batch_size` is that of one rank.

    Raises:
        ValueError: the strategies do not fit what the run has saved, or the stored choice cannot be read.
    """
    config, heads = layout.config, heads_of(model)
    shapes = [
        _keep_dynamic_whole(shape, heads[shape.path], config)
        for shape in shapes_of(model, layout.ordinary, layout.sharder, layout.setting)
    ]
    by: str = config.sharding.strategy
    known = load_choice(folder)
    choices: Sequence[HeadChoice] = ()
    if by == "auto" and known is not None:
        strategies: Mapping[str, Strategy] = known
    elif by == "auto":
        with torch.random.fork_rng(devices=[]):  # so that training draws the same numbers as without trials
            choices, cluster = _estimated(shapes, config, layout.setting.device, batch_size)
            choices = _benchmarked(choices, model, layout, trial)
        strategies = {each.path: each.strategy for each in choices}
        by = f"auto on {cluster.describe()}"
        if dist.get_rank() == 0:
            logger.info("%s", format_choices(choices, cluster))
    else:
        strategies = {shape.path: "split" for shape in shapes}
    strategies = {
        shape.path: _feasible(_split_on_one_rank(shape, heads[shape.path]), strategies, layout.num_nodes)
        for shape in shapes
    }
    strategies = _within_memory(model, strategies, layout)
    _keep(heads, strategies, known, folder, by, choices)
    return layout.planned(model, strategies)


def keep_ordinary(model: nn.Module, folder: Path | None) -> None:
    """Keep TorchRec's plan for all heads, and store that; a collective.

    Raises:
        ValueError: the run started with split heads, whose saved parameters do not fit.
    """
    heads = heads_of(model)
    ordinary: dict[str, Strategy] = dict.fromkeys(heads, "exchange")
    _keep(heads, ordinary, load_choice(folder), folder, "torchrec")


def _keep_dynamic_whole(shape: HeadShape, head: PooledFeatures, config: Config) -> HeadShape:
    """Refuse to cut the tables of a head with dynamic ones: only a split by tables keeps them whole."""
    by_tables = config.sharding.strategy == "des" and isinstance(head, Head) and head.split_by == "tables"
    if by_tables or not any(map(config.tables.is_dynamic, head.names)):
        return shape
    return replace(shape, refusal="its dynamic tables must each be whole on one rank")


def _split_on_one_rank(shape: HeadShape, head: nn.Module) -> HeadShape:
    """Allow a split on one rank if the head has other parameters when split.

    So one rank can load what several ranks have saved, and the other way round.
    """
    alone = shape.refusal == ONE_RANK and isinstance(head, Head) and head.has_weights
    return replace(shape, refusal="") if alone else shape


def _feasible(shape: HeadShape, strategies: Mapping[str, Strategy], num_nodes: int) -> Strategy:
    """The wanted strategy, or the next best that is possible."""
    wanted = strategies.get(shape.path, "exchange")
    if wanted == "exchange":
        return wanted
    if shape.traffic is None or shape.refusal:
        _warn(shape.path, shape.refusal or NO_SPLIT)
        return "exchange"
    return "split" if wanted == "two_level" and num_nodes == 1 else wanted


def _warn(path: str, reason: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(
            "%s keeps TorchRec's plan, its embeddings exchanged: it cannot be split, because %s", path, reason
        )


def _estimated(
    shapes: Sequence[HeadShape], config: Config, device: torch.device, batch_size: int
) -> tuple[Sequence[HeadChoice], Cluster]:
    """Choose for each head the strategy that rank 0 estimates to be fastest; measures the cluster first."""
    cluster = measure(device)
    wire_dtype = WIRE_DTYPES[config.sharding.wire_dtype]
    wire_bytes = None if wire_dtype is None else wire_dtype.itemsize
    batch_sizes = [batch_size] * cluster.num_ranks
    choices = [choose_strategy(shape, options(shape, cluster, batch_sizes, wire_bytes)) for shape in shapes]
    return of_rank_0(lambda: choices), cluster


def _benchmarked(
    choices: Sequence[HeadChoice], model: nn.Module, layout: ModelLayout, trial: Trial | None
) -> Sequence[HeadChoice]:
    """The strategies of the fastest trial step; as estimated if there is only one candidate."""
    found = [strategies for strategies in candidates(choices) if not layout.over_memory(model, strategies)]
    if trial is None or len(found) < 2:
        return choices
    times_s = benchmark([trial(strategies) for strategies in found], layout.setting.device)
    gc.collect()  # the trial models contain reference cycles
    return fastest(choices, found, times_s)


def _within_memory(
    model: nn.Module, strategies: Mapping[str, Strategy], layout: ModelLayout
) -> dict[str, Strategy]:
    """The same strategies, except for heads that would need more memory than a rank has."""
    refused = layout.over_memory(model, strategies)
    for path, reason in refused.items():
        _warn(path, reason)
    return {path: "exchange" if path in refused else strategy for path, strategy in strategies.items()}


def _keep(
    heads: Mapping[str, nn.Module],
    strategies: Mapping[str, Strategy],
    known: Mapping[str, Strategy] | None,
    folder: Path | None,
    by: str,
    choices: Sequence[HeadChoice] = (),
) -> None:
    """Store the strategies of a new run, or check them against the stored ones."""
    if folder is None:
        return
    if known is not None:
        with_weights = [path for path, head in heads.items() if isinstance(head, Head) and head.has_weights]
        check_choice(known, strategies, with_weights)
    elif dist.get_rank() == 0:
        reasons = {each.path: each.reason for each in choices if each.strategy == strategies[each.path]}
        save_choice(folder, strategies, reasons, by)


def benchmark(alternatives: Sequence[Alternative], device: torch.device) -> list[float]:
    """Seconds that a call of each alternative takes on the slowest rank, the same numbers on all ranks.

    Each alternative does the same work for all ranks together, finished when the call returns.
    """
    for each in alternatives:
        for _ in range(WARM_UP):
            each()
    left = list(range(len(alternatives)))
    rounds: list[dict[int, float]] = []
    began = time.perf_counter()
    while len(rounds) < MOST_ROUNDS and (len(left) > 1 or not rounds):
        turns = [left[(place + len(rounds)) % len(left)] for place in range(len(left))]
        mine = [*(_turn(alternatives[each]) for each in turns), time.perf_counter() - began]
        *took, elapsed_s = slowest(mine, device, None)
        rounds.append(dict(zip(turns, took, strict=True)))
        left = sorted(running(rounds))
        if elapsed_s > LASTS_S and len(rounds) >= LEAST_ROUNDS:
            break
    times = typical(rounds)
    return [times[each] for each in range(len(alternatives))]


def _turn(alternative: Alternative) -> float:
    """Seconds of a call on this rank."""
    alternative()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        alternative()
    return (time.perf_counter() - began) / CALLS
