"""Builds everything that the training loop uses; all ranks do this together."""

import gc
import logging
import os
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.checkpoint.checkpointer import CheckpointConfig as SaveConfig
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.ownership.records import NO_CLAIMANT
from cpr.checkpoint.state.changes import UNCHANGED
from cpr.checkpoint.state.model_state import Heir, Stateful
from cpr.humanize import size_text
from cpr.shards import dense_tensors
from data.loader import DataLoader
from dlrm.batching.dynamic import DynamicBatching
from dlrm.comm.feedback import warn_of_momentum
from dlrm.comm.links import measure_links
from dlrm.config.dataset import best_auc, total_samples
from dlrm.config.goal import Goal
from dlrm.config.schema import Config
from dlrm.dense_sync import AllReduceSync, DenseSync
from dlrm.dense_sync.delayed import DelayedSync
from dlrm.dense_sync.p3 import P3Sync
from dlrm.dense_sync.selective import SelectiveSync
from dlrm.dense_sync.tick_tock import TickTockSync
from dlrm.fault_tolerance.session import Checkpoints, Session
from dlrm.fault_tolerance.setup import RecoverySetup, save_config
from dlrm.launch.device import Ranks, of_rank_0
from dlrm.launch.stop_signal import StopSignal
from dlrm.models.mlp import ONEDNN_DTYPES
from dlrm.optim.build import Optimizers
from dlrm.pipeline.build import make_schedule
from dlrm.pipeline.tick_tock import Replicas
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.plan import bytes_per_rank, format_plan
from dlrm.sharding.splitting.planning.planner import keep_ordinary, plan_heads
from dlrm.sharding.splitting.planning.saved_choice import load_choice
from dlrm.sharding.splitting.planning.shapes import heads_of
from dlrm.sharding.splitting.planning.torchrec_plan import ModelLayout, Planned
from dlrm.sharding.tables import initialize_tables
from dlrm.sharding.worker_speeds import load_speeds, save_speeds
from dlrm.telemetry import make_run_folder, open_telemetry, scaling
from dlrm.telemetry.scaling import ScalingMeter
from dlrm.training.best import BestSave, BestSelection, Patience, Selection
from dlrm.training.data import Inputs
from dlrm.training.encoding import refuse_other_encoding, refuse_other_order, warn_of_other_inputs
from dlrm.training.evaluation import evaluate
from dlrm.training.model import Unsharded, apply_plan, unsharded
from dlrm.training.proxy_model import ProxyModel
from dlrm.training.trainer import NUM_SCALARS, Trainer

logger = logging.getLogger(__name__)

BEST_SAVE_BYTES: Final = 128 * 2**20
"""Host memory of a worker for copies while the best state is saved."""


def start_process_group(ranks: Ranks, device: torch.device) -> None:
    """Join the other ranks, by NCCL on CUDA and gloo on the CPU; without torchrun, make a group of one.

    The timeout is PyTorch's default. Giving up on a slow rank would end a run without recovery;
    `recovery.timeout_s` is for runs that restart.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in its __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def end_process_group() -> None:
    """Leave the process group, whose threads end with it.

    Models hold groups in reference cycles. A thread of Gloo that still runs after that, with the tensors
    of the last collective, would abort the process if it let go of them while the interpreter ends
    (pytorch/pytorch#190489).
    """
    gc.collect()
    dist.destroy_process_group()


def shard(inputs: Inputs, initialize: bool = True, folder: Path | None = None) -> DistributedModelParallel:
    """Build the sharded model of a run, with the initial values of the seed if `initialize`.

    The run's `folder`, if given, stores the chosen strategies.
    """
    speeds = _known_speeds(inputs, folder)
    before = unsharded(inputs, speeds=speeds)
    planned = _plan(before, inputs, folder)
    if inputs.ranks.rank == 0:
        logger.info("tables:\n%s", format_plan(planned.plan, before.model, planned.strategies))
        if speeds is not None:
            held = bytes_per_rank(planned.plan, len(speeds))
            parts = [
                f"rank {rank} ({speed / sum(speeds):.0%} of the samples) has {size_text(size)}"
                for rank, (speed, size) in enumerate(zip(speeds, held, strict=True))
            ]
            logger.info(
                "tables are laid out by the speeds that the launch before has measured: %s", ", ".join(parts)
            )
    return apply_plan(before, planned, inputs, initialize)


def _known_speeds(inputs: Inputs, folder: Path | None) -> list[float] | None:
    """Speeds of the ranks that an earlier launch of the run has measured, where sizes follow them."""
    if inputs.config.train.batching != "dynamic":
        return None
    return load_speeds(folder, inputs.ranks.local_rank)


def _plan(before: Unsharded, inputs: Inputs, folder: Path | None) -> Planned:
    config = inputs.config
    if config.sharding.strategy == "des" and not heads_of(before.model) and inputs.ranks.rank == 0:
        logger.warning(
            "sharding.strategy=des splits nothing: %s has no operators to split", config.model.kind
        )
    if config.sharding.strategy == "torchrec" or _has_no_choice(before, inputs, folder):
        keep_ordinary(before.model, folder)
        return Planned(plan=before.plan, sharders=[before.sharder], strategies={})
    layout = ModelLayout.of(before.plan, before.sharder, config, inputs.device, inputs.ids)
    return plan_heads(before.model, layout, inputs.loader.config.batch_size, folder, ProxyModel(inputs))


def _has_no_choice(before: Unsharded, inputs: Inputs, folder: Path | None) -> bool:
    """Whether there is nothing to choose.

    So it is for a model of the user without heads, and for `auto` on one rank without a stored choice of an
    earlier start.
    """
    if not heads_of(before.model):
        return True
    is_auto = inputs.config.sharding.strategy == "auto"
    return is_auto and dist.get_world_size() == 1 and load_choice(folder) is None


def settle_strategies(inputs: Inputs, folder: Path) -> None:
    """Choose the strategies under `auto` and store them in the run folder, before the model is built.

    The trials allocate tables of their own, which must not land in the resident memory that recovery keeps
    for the model's tables.
    """
    if inputs.config.sharding.strategy == "auto" and load_choice(folder) is None:
        _plan(unsharded(inputs, speeds=_known_speeds(inputs, folder)), inputs, folder)


def build(inputs: Inputs, stop: StopSignal, recovery: RecoverySetup | None = None) -> Trainer:
    """Build everything that the training loop uses; a collective, after the rendezvous."""
    config, ranks = inputs.config, inputs.ranks
    _warn_of_slow_bf16(config, inputs.device)
    _refuse_dynamic_batches_on_gpus(inputs)
    folder = inputs.resume or _agreed_run_folder(config, inputs.recipe, recovery)
    of_rank_0(lambda: refuse_other_encoding(folder, inputs.manifest, config.data.uri))
    if recovery is None:
        model = shard(inputs, initialize=False, folder=folder)
    else:
        recovery.save_in(folder)
        settle_strategies(inputs, folder)
        model = recovery.build(partial(shard, inputs, initialize=False, folder=folder))
    has_session = recovery is not None or config.checkpoint.saves or inputs.resume or config.train.warm_start
    is_adopted = recovery is not None and recovery.tables_adopted
    if not has_session or (inputs.changes != UNCHANGED and not is_adopted):
        initialize_tables(model, config.train.seed)  # else only if nothing is loaded: see `first_values`
    telemetry = open_telemetry(
        ranks.rank,
        folder,
        recipe=inputs.recipe,
        config={"recipe": inputs.recipe, **config.to_dict()},
        data=inputs.manifest,
        total_samples=total_samples(
            config, len(inputs.loader) if isinstance(inputs.loader, DataLoader) else None
        ),
        device=inputs.device,
        log_every_steps=config.train.log_every_steps,
        best_auc=best_auc(inputs.test_loader.manifest),
        evaluated_batches=len(inputs.test_loader),
    )
    optimizers = Optimizers(model, config.dense, config.tables, config.schedule)
    trainer = Trainer(
        config=config.train,
        model=model,
        schedule=make_schedule(config.train, model),
        optimizers=optimizers,
        replicas=make_dense_sync(config, model, optimizers),
        loader=inputs.loader,
        evaluate=partial(evaluate, model, inputs.test_loader, inputs.device),
        telemetry=telemetry,
        session=Session(),
        stop=stop,
        device=inputs.device,
        batching=_dynamic_batching(inputs, folder),
        scaling=_scaling_meter(inputs, model) if config.train.measure_scaling else None,
    )
    if config.train.goal is not None:
        trainer.selection = _selection(config.train.goal, trainer, inputs, folder, recovery)
    if recovery is not None:
        trainer.session = recovery.session(
            trainer.model,
            trainer.optimizers,
            _states(trainer),
            _states_per_rank(trainer),
            trainer.check_parameters,
            partial(first_values, inputs, trainer),
            inputs.changes,
        )
    elif has_session:
        trainer.session = _open_checkpoints(trainer, inputs, folder)
    return trainer


def _warn_of_slow_bf16(config: Config, device: torch.device) -> None:
    if device.type == "cpu" and config.train.precision == "bf16" and torch.bfloat16 not in ONEDNN_DTYPES:
        logger.warning(
            "this processor has no fast bfloat16 products, which take AVX-512: train.precision=fp32 is faster"
        )


def _states(trainer: Trainer) -> dict[str, Stateful]:
    """States besides model and table optimizers that a resumed run needs to continue exactly."""
    return {
        "trainer": trainer,
        "optimizers": trainer.optimizers,
        "loader": trainer.loader,
        "telemetry": trainer.telemetry,
    }


def make_dense_sync(config: Config, model: DistributedModelParallel, optimizers: Optimizers) -> DenseSync:
    """Create what keeps the dense parameters of all ranks equal, and compensates for late gradients."""
    if config.train.is_late:
        optimizers.compensate(config.train.compensation, config.train.delay_steps)
        return DelayedSync(dense_parameters(model), config.train.delay_steps)
    if config.comm.exchange == "priority":
        return P3Sync(model, optimizers, reads_each_step=config.checkpoint.saves)
    if config.comm.exchange == "selsync":
        return SelectiveSync(
            dense_parameters(model),
            optimizers.dense,
            config.comm.sync_change,
            save_every_steps=config.checkpoint.every_steps,
        )
    if dist.get_rank() == 0:
        warn_of_momentum(config.comm, optimizers.dense)
    if config.train.has_two_replicas:
        first, second = Replicas.of(model)
        return TickTockSync(list(first.values()), second, NUM_SCALARS, config.comm)
    num_scalars = NUM_SCALARS + (dist.get_world_size() if _is_dynamic(config) else 0)
    if config.train.measure_scaling and dist.get_world_size() > 1:
        num_scalars += scaling.NUM_SCALARS
    return AllReduceSync(dense_parameters(model), num_scalars, config.comm)


def _refuse_dynamic_batches_on_gpus(inputs: Inputs) -> None:
    if inputs.config.train.batching == "dynamic" and inputs.device.type != "cpu":
        raise ValueError(
            "train.batching=dynamic measures how long processors compute, and does not see how long a GPU "
            "does: leave it out, or set train.device=cpu"
        )


def _dynamic_batching(inputs: Inputs, folder: Path) -> DynamicBatching | None:
    """What resizes batches, if anything does: a stream has batches by what arrives on each rank."""
    if not (_is_dynamic(inputs.config) and isinstance(inputs.loader, DataLoader)):
        return None
    ranks = inputs.ranks
    keep = partial(save_speeds, folder, local_rank=ranks.local_rank)
    return DynamicBatching(inputs.loader, ranks.rank, ranks.world_size, keep=keep)


def _is_dynamic(config: Config) -> bool:
    """Whether batches are resized; one rank alone has the whole batch."""
    return config.train.batching == "dynamic" and dist.get_world_size() > 1


def _scaling_meter(inputs: Inputs, model: DistributedModelParallel) -> ScalingMeter:
    """Measure the links, and create what measures the rest; a collective."""
    workers = inputs.ranks.world_size
    if workers == 1:
        logger.warning(
            "train.measure_scaling: one worker alone has no links, and no other gradient to compare its own "
            "with: only the speed is measured"
        )
    return ScalingMeter(
        dense_parameters(model),
        workers,
        workers * inputs.loader.config.batch_size,
        measure_links(inputs.device).all_to_all if workers > 1 else None,
    )


def _states_per_rank(trainer: Trainer) -> dict[str, Stateful | Heir]:
    """States that belong to one rank."""
    return {} if trainer.replicas.own is None else {trainer.replicas.own_name: trainer.replicas.own}


def _open_checkpoints(trainer: Trainer, inputs: Inputs, folder: Path) -> Checkpoints:
    config = inputs.config.checkpoint
    checkpointer = _checkpointer(trainer, save_config(config, folder), before_save=trainer.check_parameters)
    initialize = partial(first_values, inputs, trainer)
    return Checkpoints(checkpointer, config, bool(inputs.resume), initialize, inputs.changes)


def _checkpointer(trainer: Trainer, config: SaveConfig, **options: Any) -> Checkpointer:
    """Create a checkpointer of a run, with every state that a resumed run needs."""
    checkpointer = Checkpointer(trainer.model, config, trainer.optimizers.table_optimizers, **options)
    for name, state in _states(trainer).items():
        checkpointer.register(name, state)
    for name, own in _states_per_rank(trainer).items():
        checkpointer.register(name, own, per_rank=True)
    return checkpointer


def _selection(
    goal: Goal, trainer: Trainer, inputs: Inputs, folder: Path, recovery: RecoverySetup | None
) -> Selection:
    """Create what keeps the best state and stops early."""
    config = inputs.config
    claimant = NO_CLAIMANT if recovery is None else recovery.claimant

    def open_directory(uri: str) -> Checkpointer:
        # training waits for the save anyway, so that more memory would not make the wait shorter
        save = SaveConfig(uri=uri, host_memory_bytes=BEST_SAVE_BYTES)
        return _checkpointer(trainer, save, claimant=claimant)

    best = BestSave(
        config.checkpoint.best_directory(folder),
        goal,
        folder.name,
        inputs.test_loader.manifest.days,
        open_directory,
    )
    return BestSelection(goal, best, Patience(goal, config.train.patience, config.train.min_improvement))


def _agreed_run_folder(config: Config, recipe: str, recovery: RecoverySetup | None) -> Path:
    root = Path(config.train.run_folder)

    def find() -> Path:
        found = recovery.find_folder(root) if recovery is not None else None
        return found or make_run_folder(root, recipe, datetime.now())

    return of_rank_0(find)


def first_values(inputs: Inputs, trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Give the model the values with which training begins; a collective, before the first save or load.

    Raises: as `warm_start`.
    """
    if inputs.config.train.warm_start:
        warm_start(inputs, trainer, checkpointer)
    elif inputs.changes == UNCHANGED:  # which may keep initial values of what is loaded: these are there
        initialize_tables(trainer.model, inputs.config.train.seed)


def warm_start(inputs: Inputs, trainer: Trainer, checkpointer: Checkpointer) -> None:
    """Load the model that `train.warm_start` names.

    Loads tables (with ids of dynamic ones), dense parameters, optimizer states and the position in the
    learning-rate schedule from the newest save there. Data, steps, metrics and random generators start over.
    Gradients that ranks had not sent yet (`comm.exchange`) are dropped.

    Raises:
        ValueError: the other run has another optimizer, or another order of columns, or its schedule has
            ended.
        CheckpointError: nothing is saved there, or nothing of this model.
    """
    config = inputs.config
    of_rank_0(lambda: refuse_other_order(config, inputs.manifest))
    state = checkpointer.warm_start(config.train.warm_start, ["optimizers"], inputs.changes)
    factor = trainer.optimizers.continue_schedule(state.step)
    if dist.get_rank() == 0:
        keeps_dense = not all(map(inputs.changes.resets, dense_tensors(trainer.model)))
        warn_of_other_inputs(config, inputs.manifest, keeps_dense)
        days = ", ".join(map(str, inputs.loader.manifest.days))
        logger.info(
            "warm start: model, optimizers and schedule (learning rates times %g) continue from save %d, "
            "step %d, of %s; the data starts over, with day %s of %s",
            factor,
            state.sequence,
            state.step,
            config.train.warm_start,
            days,
            config.data.uri,
        )
