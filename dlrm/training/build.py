"""From the inputs to everything that the training loop holds; all ranks do this together."""

import logging
import os
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.state.model_state import Heir, Stateful
from data.dataset import DatasetManifest
from dlrm.comm.feedback.step_check import warn_of_momentum
from dlrm.config.dataset import total_samples
from dlrm.config.schema import Config
from dlrm.dense_sync import AllReduceSync, DenseSync
from dlrm.dense_sync.p3 import P3Sync
from dlrm.dense_sync.selsync import SelectiveSync
from dlrm.fault_tolerance.session import Checkpoints, NoRecovery
from dlrm.fault_tolerance.setup import RecoverySetup, save_config
from dlrm.launch.device import Ranks
from dlrm.launch.stop_signal import StopSignal
from dlrm.models.mlp import ONEDNN_DTYPES
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.plan import format_plan, placements
from dlrm.sharding.splitting.planning.planner import keep_ordinary, plan_heads
from dlrm.sharding.splitting.planning.saved_choice import remembered
from dlrm.sharding.splitting.planning.torchrec_plan import ModelLayout, Planned
from dlrm.telemetry import make_run_folder, open_telemetry
from dlrm.training.data import Inputs
from dlrm.training.evaluation import evaluate
from dlrm.training.model import Unsharded, lay_out, unsharded
from dlrm.training.proxy_model import ProxyModel
from dlrm.training.trainer import NUM_SCALARS, Trainer
from dlrm.training.warm_start import warm_start

logger = logging.getLogger(__name__)


def start_process_group(ranks: Ranks, device: torch.device) -> None:
    """Meet the other ranks, by NCCL on CUDA and gloo on the CPU; without torchrun, be a group of one.

    Ranks wait for each other as patiently as PyTorch does: to give up on a slow one would end a run without
    recovery. `recovery.timeout_s` is for those that go on afterwards.
    """
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
    before = unsharded(inputs)
    planned = _plan(before, inputs, folder)
    if inputs.ranks.rank == 0:
        laid = placements(planned.plan, before.model, planned.strategies)
        logger.info("tables:\n%s", format_plan(laid))
    return lay_out(before, planned, inputs, initialize)


def _plan(before: Unsharded, inputs: Inputs, folder: Path | None) -> Planned:
    config = inputs.config
    if config.sharding.strategy == "torchrec" or _is_alone(inputs, folder):
        keep_ordinary(before.model, folder)
        return Planned(plan=before.plan, sharders=[before.sharder], strategies={})
    layout = ModelLayout.of(before.plan, before.sharder, config, inputs.device, inputs.ids)
    return plan_heads(before.model, layout, inputs.loader.config.batch_size, folder, ProxyModel(inputs))


def _is_alone(inputs: Inputs, folder: Path | None) -> bool:
    """Whether `auto` has nothing to choose, as there is one rank, and none has chosen before it."""
    is_auto = inputs.config.sharding.strategy == "auto"
    return is_auto and dist.get_world_size() == 1 and remembered(folder) is None


def settle_strategies(inputs: Inputs, folder: Path) -> None:
    """Let a run's folder know what `auto` chooses; all ranks call it together, before they build the model.

    What it tries out has tables of its own, which are none of the run's and must not outlive this worker.

    Args:
        inputs: of the run.
        folder: of the run, which may know already.
    """
    if inputs.config.sharding.strategy == "auto" and remembered(folder) is None:
        _plan(unsharded(inputs), inputs, folder)


def build(inputs: Inputs, stop: StopSignal, recovery: RecoverySetup | None = None) -> Trainer:
    """Everything the training loop holds; all ranks call it together.

    Args:
        inputs: say what is trained.
        stop: how somebody stops it.
        recovery: what survives failures, its workers having met; None: nothing does.
    """
    config, ranks = inputs.config, inputs.ranks
    _warn_of_slow_arithmetic(config, inputs.device)
    folder = inputs.resume or _agreed_run_folder(config, inputs.recipe, ranks.rank, recovery)
    if recovery is None:
        model = shard(inputs, folder=folder)
    else:
        recovery.save_in(folder)
        settle_strategies(inputs, folder)
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
        evaluated_batches=len(inputs.test_loader),
    )
    optimizers = Optimizers(model, config.dense, config.tables, config.schedule)
    trainer = Trainer(
        config=config.train,
        model=model,
        optimizers=optimizers,
        replicas=_replicas(config, model, optimizers),
        loader=inputs.loader,
        evaluate=partial(evaluate, model, inputs.test_loader, inputs.device),
        telemetry=telemetry,
        session=NoRecovery(),
        stop=stop,
        device=inputs.device,
    )
    if recovery is not None:
        trainer.session = recovery.session(
            trainer.model,
            trainer.optimizers,
            _states(trainer),
            _own_states(trainer),
            trainer.check_parameters,
            partial(warm_start, inputs, optimizers),
        )
    elif config.checkpoint.saves or inputs.resume or config.train.warm_start:
        trainer.session = _open_checkpoints(trainer, inputs, folder)
    return trainer


def _warn_of_slow_arithmetic(config: Config, device: torch.device) -> None:
    if device.type == "cpu" and config.train.precision == "bf16" and torch.bfloat16 not in ONEDNN_DTYPES:
        logger.warning(
            "this processor has no fast bfloat16 products, which take AVX-512: train.precision=fp32 is faster"
        )


def _states(trainer: Trainer) -> dict[str, Stateful]:
    """Everything besides model and table optimizers that a run needs to go on as if nothing had been."""
    return {
        "trainer": trainer,
        "optimizers": trainer.optimizers,
        "loader": trainer.loader,
        "telemetry": trainer.telemetry,
    }


def _replicas(config: Config, model: DistributedModelParallel, optimizers: Optimizers) -> DenseSync:
    """What keeps the dense parameters of all ranks alike."""
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
    return AllReduceSync(dense_parameters(model), NUM_SCALARS, config.comm)


def _own_states(trainer: Trainer) -> dict[str, Stateful | Heir]:
    """What belongs to this rank alone."""
    return {} if trainer.replicas.own is None else {"replica": trainer.replicas.own}


def _open_checkpoints(trainer: Trainer, inputs: Inputs, folder: Path) -> Checkpoints:
    config = inputs.config.checkpoint
    checkpointer = Checkpointer(
        trainer.model,
        save_config(config, folder),
        trainer.optimizers.table_optimizers,
        before_save=trainer.check_parameters,
    )
    for name, state in _states(trainer).items():
        checkpointer.register(name, state)
    for name, own in _own_states(trainer).items():
        checkpointer.register(name, own, per_rank=True)
    return Checkpoints(
        checkpointer, config, bool(inputs.resume), partial(warm_start, inputs, trainer.optimizers)
    )


def _agreed_run_folder(config: Config, recipe: str, rank: int, recovery: RecoverySetup | None) -> Path:
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
