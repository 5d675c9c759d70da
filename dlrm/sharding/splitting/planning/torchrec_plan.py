"""Turns the strategies of a model's heads into a plan and sharders for `DistributedModelParallel`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from dlrm.comm.links import ranks_per_node
from dlrm.config.schema import Config
from dlrm.launch.device import of_rank_0
from dlrm.sharding.memory import memory_for_tables
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.layout import split_plan
from dlrm.sharding.splitting.operator_tables import make_operator_sharder
from dlrm.sharding.splitting.planning.shapes import (
    PlanSetting,
    heads_of,
    ids_of,
    operator_bytes,
    table_bytes,
    too_large,
)
from dlrm.sharding.splitting.planning.strategies import Strategy
from dlrm.sharding.splitting.sharded import HeadSharder

WIRE_DTYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plan, sharders and strategies (by head path) of a model."""

    plan: ShardingPlan
    sharders: list[Any]
    strategies: Mapping[str, Strategy]


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """What plans depend on besides the strategies of heads: TorchRec's plan and the run's setting."""

    ordinary: ShardingPlan
    """TorchRec's plan."""
    sharder: EmbeddingBagCollectionSharder
    setting: PlanSetting
    config: Config
    per_node: int
    """Ranks per node."""

    @classmethod
    def of(
        cls,
        ordinary: ShardingPlan,
        sharder: EmbeddingBagCollectionSharder,
        config: Config,
        device: torch.device,
        ids: Mapping[str, float],
    ) -> "ModelLayout":
        """Make the layout of a run.

        A collective, which uses rank 0's mean number of ids per sample by feature.
        """
        agreed = of_rank_0(lambda: dict(ids))  # tables are placed by these numbers, equal on all ranks
        setting = PlanSetting(num_ranks=dist.get_world_size(), ids=agreed, dense=config.dense, device=device)
        return cls(
            ordinary=ordinary,
            sharder=sharder,
            setting=setting,
            config=config,
            per_node=ranks_per_node(device),
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.setting.num_ranks // self.per_node

    def over_memory(self, model: nn.Module, strategies: Mapping[str, Strategy]) -> dict[str, str]:
        """Heads, by path, that would need more memory than a rank has, and why."""
        num_ranks, config = self.setting.num_ranks, self.config
        ordinary, split = {}, {}
        for path, head in heads_of(model).items():
            plan, optimizer = self.ordinary.plan[f"{path}.tables"], config.tables.optimizer
            ordinary[path] = table_bytes(head, plan, num_ranks, optimizer)
            strategy = strategies[path]
            if strategy != "exchange":
                assert isinstance(head, Head)
                pieces = self._pieces(head, strategy)
                split[path] = table_bytes(head, pieces, num_ranks, optimizer)
                if strategy != "rows":
                    weights = operator_bytes(head, pieces, num_ranks, config.dense.optimizer)
                    split[path] = [sum(each) for each in zip(split[path], weights, strict=True)]
        available = memory_for_tables(self.setting.device, config.sharding.reserved_share)
        return too_large(split, ordinary, available)

    def planned(self, model: nn.Module, strategies: Mapping[str, Strategy]) -> Planned:
        """Plan the model under strategies that are possible."""
        plan, sharders = dict(self.ordinary.plan), [self.sharder]
        kinds: dict[type[Head], HeadSharder] = {}
        for path, head in heads_of(model).items():
            strategy = strategies[path]
            if strategy == "exchange":
                continue
            assert isinstance(head, Head)
            # by rows, operators without an exact row split keep their forward: only tables are split
            stays = strategy == "rows" and "rows" not in (head.split_by, *head.also_by)
            del plan[f"{path}.tables"]
            plan[f"{path}.tables" if stays else path] = self._pieces(head, strategy)
            if not stays:
                same = {
                    strategies[each] for each, other in heads_of(model).items() if type(other) is type(head)
                }
                # DistributedModelParallel finds sharders by module type, so each type has one strategy
                assert same <= {strategy, "exchange"}, f"heads of a type are split alike, not {sorted(same)}"
                kinds[type(head)] = self._head_sharder(head, strategy)
        return Planned(plan=ShardingPlan(plan), sharders=[*sharders, *kinds.values()], strategies=strategies)

    def _head_sharder(self, head: Head, strategy: Strategy) -> HeadSharder:
        operators = None
        if head.has_weights:
            operators = make_operator_sharder(self.config.dense, self.setting.device)
        wire_dtype = WIRE_DTYPES[self.config.sharding.wire_dtype]
        together = self.per_node if strategy == "two_level" else 1
        return HeadSharder(type(head), self.sharder, wire_dtype, operators, together)

    def _pieces(self, head: Head, strategy: Strategy) -> EmbeddingModuleShardingPlan:
        """Plan of a split head's tables."""
        return split_plan(
            head,
            "rows" if strategy == "rows" else head.split_by,
            ids_of(head, self.setting.ids),
            self.sharder,
            (self.setting.num_ranks, self.per_node),
            self.setting.device.type,
        )
