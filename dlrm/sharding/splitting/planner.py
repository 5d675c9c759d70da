"""From TorchRec's plan to the one that a run trains with: which heads are split, agreed by all ranks.

`torchrec` leaves the plan alone, `des` splits what can be split, `auto` measures the cluster, compares all
strategies of every head, unless the run folder remembers how the run began (`choice_file`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from dlrm.config import Config
from dlrm.models.tables import PooledFeatures
from dlrm.sharding.plan import memory_for_tables
from dlrm.sharding.splitting import choose
from dlrm.sharding.splitting.choice_file import check_kept, remember, remembered
from dlrm.sharding.splitting.choose import Choice, HeadShape, Strategy
from dlrm.sharding.splitting.cluster import Cluster, measure, ranks_per_node
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.memory import operator_bytes, table_bytes, too_large
from dlrm.sharding.splitting.operator_tables import make_operator_sharder
from dlrm.sharding.splitting.placing import split_plan
from dlrm.sharding.splitting.shapes import ONE_RANK, Setting, heads_of, ids_of, shapes_of
from dlrm.sharding.splitting.sharded import HeadSharder

logger = logging.getLogger(__name__)

WIRE_DTYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What `DistributedModelParallel` wants."""

    plan: ShardingPlan
    sharders: list[Any]
    strategies: Mapping[str, Strategy]
    """By path of the head."""


def plan_heads(
    model: nn.Module,
    ordinary: ShardingPlan,
    sharder: EmbeddingBagCollectionSharder,
    config: Config,
    device: torch.device,
    batch_size: int,
    ids: Mapping[str, float],
    folder: Path | None = None,
) -> Planned:
    """Split the heads that are to be split; all ranks call it together.

    Args:
        model: unsharded.
        ordinary: TorchRec's plan of it.
        sharder: of its tables.
        config: of the run.
        device: of this rank.
        batch_size: samples of one rank in one step.
        ids: that a sample has, on average, by feature; those of rank 0 count.
        folder: of the run; None: nothing is remembered.

    Raises:
        ValueError: what the run has saved does not fit the strategies, or its choice cannot be read.
    """
    num_ranks, per_node = dist.get_world_size(), ranks_per_node(device)
    # tables are placed by them, so that all ranks must mean the same ones
    agreed = cast("dict[str, float]", _from_rank_0(dict(ids)))
    setting = Setting(num_ranks=num_ranks, ids=agreed, dense=config.dense, device=device)
    heads = heads_of(model)
    shapes = [
        _kept_whole(shape, heads[shape.path], config)
        for shape in shapes_of(model, ordinary, sharder, setting)
    ]
    strategy, known = config.sharding.strategy, remembered(folder)
    choices: Sequence[Choice] = ()
    if strategy == "auto" and known is not None:
        strategies = known
    elif strategy == "auto":
        choices, cluster = _compared(shapes, config, device, batch_size)
        strategies = cast("dict[str, Strategy]", _from_rank_0({each.path: each.strategy for each in choices}))
        strategy = f"auto on {cluster.describe()}"
    else:
        strategies = {shape.path: "split" for shape in shapes}
    strategies = {
        shape.path: _possible(_though_alone(shape, heads[shape.path]), strategies, num_ranks // per_node)
        for shape in shapes
    }
    layout = _Layout(ordinary, sharder, setting, config, per_node)
    strategies = _that_fit(model, strategies, layout)
    _keep(heads, strategies, known, folder, strategy, choices)
    return _planned(model, strategies, layout)


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
) -> tuple[list[Choice], Cluster]:
    """What takes the least time on the links as they are now; the same on all ranks but for rounding."""
    cluster = measure(device)
    wire_dtype = WIRE_DTYPES[config.sharding.wire_dtype]
    wire_bytes = None if wire_dtype is None else wire_dtype.itemsize
    batch_sizes = [batch_size] * cluster.num_ranks
    choices = [
        choose.choose(shape, choose.options(shape, cluster, batch_sizes, wire_bytes)) for shape in shapes
    ]
    if dist.get_rank() == 0:
        logger.info("%s", choose.format_choices(choices, cluster))
    return choices, cluster


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


@dataclass(frozen=True)
class _Layout:
    """What plans of heads are made from, besides their strategies."""

    ordinary: ShardingPlan
    sharder: EmbeddingBagCollectionSharder
    setting: Setting
    config: Config
    per_node: int

    def pieces(self, head: Head, strategy: Strategy) -> EmbeddingModuleShardingPlan:
        """Of a head's tables, under any strategy but `exchange`."""
        return split_plan(
            head,
            "rows" if strategy == "rows" else head.split_by,
            ids_of(head, self.setting.ids),
            self.sharder,
            (self.setting.num_ranks, self.per_node),
            self.setting.device.type,
        )


def _that_fit(model: nn.Module, strategies: Mapping[str, Strategy], layout: _Layout) -> dict[str, Strategy]:
    """The same, but for heads that would need more memory than a rank has."""
    num_ranks, config = layout.setting.num_ranks, layout.config
    ordinary, split = {}, {}
    for path, head in heads_of(model).items():
        plan, optimizer = layout.ordinary.plan[f"{path}.tables"], config.tables.optimizer
        ordinary[path] = table_bytes(head, plan, num_ranks, optimizer)
        strategy = strategies[path]
        if strategy != "exchange":
            assert isinstance(head, Head)
            pieces = layout.pieces(head, strategy)
            split[path] = table_bytes(head, pieces, num_ranks, optimizer)
            if strategy != "rows":
                beside = operator_bytes(head, pieces, num_ranks, config.dense.optimizer)
                split[path] = [sum(each) for each in zip(split[path], beside, strict=True)]
    refused = too_large(split, ordinary, memory_for_tables(layout.setting.device))
    for path, reason in refused.items():
        _warn(path, reason)
    return {path: "exchange" if path in refused else strategy for path, strategy in strategies.items()}


def _planned(model: nn.Module, strategies: Mapping[str, Strategy], layout: _Layout) -> Planned:
    sharder, config = layout.sharder, layout.config
    plan, sharders = dict(layout.ordinary.plan), [sharder]
    wire_dtype = WIRE_DTYPES[config.sharding.wire_dtype]
    kinds: dict[type[Head], HeadSharder] = {}
    for path, head in heads_of(model).items():
        strategy = strategies[path]
        if strategy == "exchange":
            continue
        assert isinstance(head, Head)
        # by rows, the operator may not be split
        stays = strategy == "rows" and "rows" not in (head.split_by, *head.also_by)
        del plan[f"{path}.tables"]
        plan[f"{path}.tables" if stays else path] = layout.pieces(head, strategy)
        if not stays:
            operators = None
            if head.has_weights:
                operators = make_operator_sharder(config.dense, layout.setting.device)
            together = layout.per_node if strategy == "two_level" else 1
            same = {strategies[each] for each, other in heads_of(model).items() if type(other) is type(head)}
            # DistributedModelParallel finds a sharder by the type of the module
            assert same <= {strategy, "exchange"}, f"heads of one type are split alike, not {sorted(same)}"
            kinds[type(head)] = HeadSharder(type(head), sharder, wire_dtype, operators, together)
    return Planned(plan=ShardingPlan(plan), sharders=[*sharders, *kinds.values()], strategies=strategies)
