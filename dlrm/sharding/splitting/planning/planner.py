"""Which heads are split, agreed by all ranks.

`torchrec` splits none, `des` what can be split. `auto` measures the cluster, compares all strategies of every
head by their bytes and estimated times, and lets the few that may be the fastest take turns on a stand-in for
the model; unless the run folder remembers how the run began (`choice_file`).
"""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dlrm.config.schema import Config
from dlrm.sharding.pooled import PooledFeatures
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning import strategies as choose
from dlrm.sharding.splitting.planning.benchmark import race
from dlrm.sharding.splitting.planning.cluster import Cluster, measure
from dlrm.sharding.splitting.planning.saved_choice import check_kept, remember, remembered
from dlrm.sharding.splitting.planning.shapes import ONE_RANK, heads_of, shapes_of
from dlrm.sharding.splitting.planning.strategies import Choice, HeadShape, Strategy
from dlrm.sharding.splitting.planning.torchrec_plan import WIRE_DTYPES, ModelLayout, Planned

logger = logging.getLogger(__name__)

Trial = Callable[[Mapping[str, Strategy]], Callable[[], None]]
"""From strategies by path of the head to a training step under them, of a model that is like the run's."""


def plan_heads(
    model: nn.Module,
    layout: ModelLayout,
    batch_size: int,
    folder: Path | None = None,
    trial: Trial | None = None,
) -> Planned:
    """Split the heads that are to be split; all ranks call it together.

    Args:
        model: unsharded.
        layout: of the run.
        batch_size: samples of one rank in one step.
        folder: of the run; None: nothing is remembered.
        trial: what `auto` tries strategies on; None: estimates decide.

    Raises:
        ValueError: what the run has saved does not fit the strategies, or its choice cannot be read.
    """
    config, heads = layout.config, heads_of(model)
    shapes = [
        _kept_whole(shape, heads[shape.path], config)
        for shape in shapes_of(model, layout.ordinary, layout.sharder, layout.setting)
    ]
    by, known = config.sharding.strategy, remembered(folder)
    choices: Sequence[Choice] = ()
    if by == "auto" and known is not None:
        strategies: Mapping[str, Strategy] = known
    elif by == "auto":
        with torch.random.fork_rng(devices=[]):  # training draws what it would without
            choices, cluster = _compared(shapes, config, layout.setting.device, batch_size)
            choices = _tried(choices, model, layout, trial)
        strategies = {each.path: each.strategy for each in choices}
        by = f"auto on {cluster.describe()}"
        if dist.get_rank() == 0:
            logger.info("%s", choose.format_choices(choices, cluster))
    else:
        strategies = {shape.path: "split" for shape in shapes}
    strategies = {
        shape.path: _possible(_though_alone(shape, heads[shape.path]), strategies, layout.num_nodes)
        for shape in shapes
    }
    strategies = _with_room(model, strategies, layout)
    _keep(heads, strategies, known, folder, by, choices)
    return layout.planned(model, strategies)


def keep_ordinary(model: nn.Module, folder: Path | None) -> None:
    """Where TorchRec's plan is kept: remember that; all ranks call it together.

    Args:
        model: unsharded.
        folder: of the run; None: nothing is remembered.

    Raises:
        ValueError: the run began with heads that were split, and what it saved does not fit.
    """
    heads = heads_of(model)
    ordinary: dict[str, Strategy] = dict.fromkeys(heads, "exchange")
    _keep(heads, ordinary, remembered(folder), folder, "torchrec")


def _kept_whole(shape: HeadShape, head: PooledFeatures, config: Config) -> HeadShape:
    """Dynamic tables are whole on one rank: no other split is possible than one by tables, when told to."""
    by_tables = config.sharding.strategy == "des" and isinstance(head, Head) and head.split_by == "tables"
    if by_tables or not any(map(config.tables.is_dynamic, head.names)):
        return shape
    return replace(shape, refusal="its dynamic tables must each be whole on one rank")


def _though_alone(shape: HeadShape, head: nn.Module) -> HeadShape:
    """One rank splits too what it is told to split, if the head has other parameters then.

    What several ranks have saved can be loaded by one, and the other way round.
    """
    alone = shape.refusal == ONE_RANK and isinstance(head, Head) and head.has_weights
    return replace(shape, refusal="") if alone else shape


def _possible(shape: HeadShape, strategies: Mapping[str, Strategy], num_nodes: int) -> Strategy:
    """What was wanted, or the next best that can be done."""
    wanted = strategies.get(shape.path, "exchange")
    if wanted == "exchange":
        return wanted
    if shape.traffic is None or shape.refusal:
        _warn(shape.path, shape.refusal or choose.NO_SPLIT)
        return "exchange"
    return "split" if wanted == "two_level" and num_nodes == 1 else wanted


def _warn(path: str, reason: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(
            "%s keeps TorchRec's plan, its embeddings exchanged: it cannot be split, because %s", path, reason
        )


def _compared(
    shapes: Sequence[HeadShape], config: Config, device: torch.device, batch_size: int
) -> tuple[Sequence[Choice], Cluster]:
    """What is estimated to take the least time on the links as they are now, as rank 0 sees it."""
    cluster = measure(device)
    wire_dtype = WIRE_DTYPES[config.sharding.wire_dtype]
    wire_bytes = None if wire_dtype is None else wire_dtype.itemsize
    batch_sizes = [batch_size] * cluster.num_ranks
    choices = [
        choose.choose(shape, choose.options(shape, cluster, batch_sizes, wire_bytes)) for shape in shapes
    ]
    return cast("Sequence[Choice]", _from_rank_0(choices)), cluster


def _tried(
    choices: Sequence[Choice], model: nn.Module, layout: ModelLayout, trial: Trial | None
) -> Sequence[Choice]:
    """The strategies under which a step takes the least time; as estimated where there is nothing to try."""
    found = [
        strategies for strategies in choose.candidates(choices) if not layout.without_room(model, strategies)
    ]
    if trial is None or len(found) < 2:
        return choices
    times_s = race([trial(strategies) for strategies in found], layout.setting.device)
    gc.collect()  # what was tried refers to itself
    return choose.fastest(choices, found, times_s)


def _with_room(
    model: nn.Module, strategies: Mapping[str, Strategy], layout: ModelLayout
) -> dict[str, Strategy]:
    """The same, but for heads that would need more memory than a rank has."""
    refused = layout.without_room(model, strategies)
    for path, reason in refused.items():
        _warn(path, reason)
    return {path: "exchange" if path in refused else strategy for path, strategy in strategies.items()}


def _keep(
    heads: Mapping[str, nn.Module],
    strategies: Mapping[str, Strategy],
    known: Mapping[str, Strategy] | None,
    folder: Path | None,
    by: str,
    choices: Sequence[Choice] = (),
) -> None:
    """Remember the strategies of a run that begins; refuse those that do not fit how it began."""
    if folder is None:
        return
    if known is not None:
        with_weights = [path for path, head in heads.items() if isinstance(head, Head) and head.has_weights]
        check_kept(known, strategies, with_weights)
    elif dist.get_rank() == 0:
        reasons = {each.path: each.reason for each in choices if each.strategy == strategies[each.path]}
        remember(folder, strategies, reasons, by)


def _from_rank_0(value: Any) -> Any:
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]
