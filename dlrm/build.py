"""From the inputs to everything that the training loop holds; all ranks do this together."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.model_state import Stateful
from cpr.shards import table_groups
from data.dataset import DatasetManifest
from dlrm.config import CheckpointConfig, Config
from dlrm.evaluation import evaluate
from dlrm.inputs import Inputs, Ranks, total_samples
from dlrm.models.build import build_model
from dlrm.models.tables import PooledFeatures
from dlrm.optim import Optimizers, arithmetic_dtype, dense_parameters
from dlrm.recovery import Recovery, save_config
from dlrm.replicas import Replicas
from dlrm.session import Checkpoints, NoRecovery
from dlrm.sharding.dynamic import make_dynamic
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.plan import format_plan, make_plan, make_sharder, placements, tables_of
from dlrm.sharding.splitting.planner import WIRE_DTYPES, keep_ordinary, plan_heads
from dlrm.sharding.splitting.sharded import ShardedHead
from dlrm.sharding.tables import initialize_tables
from dlrm.stop import StopSignal
from dlrm.telemetry import make_run_folder, open_telemetry
from dlrm.trainer import NUM_SCALARS, Trainer

logger = logging.getLogger(__name__)


def start_process_group(ranks: Ranks, device: torch.device) -> None:
    """Meet the other ranks, by NCCL on CUDA and gloo on the CPU; without torchrun, be a group of one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in its __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def shard(inputs: Inputs, initialize: bool = True, folder: Path | None = None) -> DistributedModelParallel:
    """The model of this run, its tables laid over the ranks.

    Args:
        inputs: say which model.
        initialize: whether tables get the initial values of the seed; without, those are TorchRec's.
        folder: of the run, which remembers the strategies of its heads; None: nothing does.
    """
    config, device = inputs.config, inputs.device
    dtype = arithmetic_dtype(config.train.precision)
    torch.manual_seed(config.train.seed)
    is_dynamic = config.tables.is_dynamic
    features = [
        replace(feature, rows=config.tables.dynamic_rows) if is_dynamic(feature.name) else feature
        for feature in inputs.manifest.features
    ]
    model = build_model(config.model, features, len(inputs.manifest.dense), dtype)
    dynamic = [table.name for table in tables_of(model) if any(map(is_dynamic, table.feature_names))]
    sharder = make_sharder(config.tables, device, dtype, WIRE_DTYPES[config.sharding.wire_dtype])
    batch_size = inputs.loader.config.batch_size
    plan = make_plan(model, sharder, config.sharding, device, batch_size, dynamic)
    sharders: list[Any] = [sharder]
    strategies: Mapping[str, str] = {}
    if config.sharding.strategy == "torchrec":
        keep_ordinary(model, folder)
    else:
        planned = plan_heads(model, plan, sharder, config, device, batch_size, inputs.ids, folder)
        plan, sharders, strategies = planned.plan, planned.sharders, planned.strategies
    if inputs.ranks.rank == 0:
        logger.info("tables:\n%s", format_plan(placements(plan, model, strategies)))
    move_dense(model, device)
    sharded = DistributedModelParallel(
        model, device=device, plan=plan, sharders=sharders, init_data_parallel=False
    )
    make_dynamic(sharded, dict.fromkeys(dynamic, config.tables.admit_after), config.train.seed)
    if initialize:
        initialize_tables(sharded, config.train.seed)
    for module in sharded.modules():
        if isinstance(module, PooledFeatures | ShardedHead):  # each with a dtype of its own
            use_host_lookups([group.emb_module for group in table_groups(module)], module.dtype)
    return sharded


def move_dense(model: nn.Module, device: torch.device) -> None:
    """Move what is no table to a device, in place; tables are on the meta device until they are sharded."""
    for each in (*model.parameters(), *model.buffers()):
        if not each.is_meta:
            each.data = each.data.to(device)


def build(inputs: Inputs, stop: StopSignal, recovery: Recovery | None = None) -> Trainer:
    """Everything the training loop holds; all ranks call it together.

    Args:
        inputs: say what is trained.
        stop: how somebody stops it.
        recovery: what survives failures, its workers having met; None: nothing does.
    """
    config, ranks = inputs.config, inputs.ranks
    folder = inputs.resume or _agreed_run_folder(config, inputs.recipe, ranks.rank, recovery)
    if recovery is None:
        model = shard(inputs, folder=folder)
    else:
        recovery.save_in(folder)
        model = recovery.build(partial(shard, inputs, folder=folder))
    telemetry = open_telemetry(
        ranks.rank,
        folder,
        recipe=inputs.recipe,
        config={"recipe": inputs.recipe, **config.to_dict()},
        total_samples=total_samples(config, len(inputs.loader)),
        device=inputs.device,
        log_every_steps=config.train.log_every_steps,
        best_auc=_best_auc(inputs.test_loader.manifest),
    )
    trainer = Trainer(
        config=config.train,
        model=model,
        optimizers=Optimizers(model, config.dense, config.tables, config.schedule),
        replicas=Replicas(dense_parameters(model), NUM_SCALARS),
        loader=inputs.loader,
        evaluate=partial(evaluate, model, inputs.test_loader, inputs.device),
        telemetry=telemetry,
        session=NoRecovery(),
        stop=stop,
        device=inputs.device,
    )
    if recovery is not None:
        trainer.session = recovery.session(trainer.model, trainer.optimizers, _states(trainer))
    elif config.checkpoint.saves or inputs.resume:
        trainer.session = _open_checkpoints(trainer, config.checkpoint, folder, resume=bool(inputs.resume))
    return trainer


def _states(trainer: Trainer) -> dict[str, Stateful]:
    """Everything besides model and table optimizers that a run needs to go on as if nothing had been."""
    return {
        "trainer": trainer,
        "optimizers": trainer.optimizers,
        "loader": trainer.loader,
        "telemetry": trainer.telemetry,
    }


def _open_checkpoints(trainer: Trainer, config: CheckpointConfig, folder: Path, resume: bool) -> Checkpoints:
    checkpointer = Checkpointer(
        trainer.model, save_config(config, folder), trainer.optimizers.table_optimizers
    )
    for name, state in _states(trainer).items():
        checkpointer.register(name, state)
    return Checkpoints(checkpointer, config, resume)


def _agreed_run_folder(config: Config, recipe: str, rank: int, recovery: Recovery | None) -> Path:
    folder: list[Any] = [None]
    if rank == 0:
        root = Path(config.train.run_folder)
        try:
            found = recovery.find_folder(root) if recovery is not None else None
            folder = [found or make_run_folder(root, recipe, datetime.now())]
        except ValueError as error:
            folder = [error]
    dist.broadcast_object_list(folder)
    if isinstance(folder[0], ValueError):
        raise folder[0]
    return Path(folder[0])


def _best_auc(test: DatasetManifest) -> float | None:
    """The AUC of the planted teacher on the test day, where the data has one (`data.synthetic`)."""
    days = test.provenance.get("days", {})
    if len(test.days) != 1 or str(test.days[0]) not in days:
        return None
    return float(days[str(test.days[0])]["best_auc"])
