"""From a configuration to everything that the training loop holds, in the order in which it can fail.

What a user can get wrong is found by `prepare`, before a process group exists; what needs the group
comes after it, in `build`.
"""

import logging
import os
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.cache import CacheConfig, CachedSource
from data.dataset import DatasetManifest, read_manifest
from data.loader import DataLoader, LoaderConfig, ParquetSource, RowGroupSource
from data.loader.decode import decode
from dlrm.config import Config
from dlrm.evaluation import evaluate
from dlrm.models import build_model
from dlrm.models.tables import PooledFeatures
from dlrm.optim import Optimizers, arithmetic_dtype, dense_parameters
from dlrm.replicas import Replicas
from dlrm.session import NoRecovery
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.plan import format_plan, make_plan, make_sharder, placements
from dlrm.sharding.tables import initialize_tables, table_groups
from dlrm.stop import StopSignal
from dlrm.telemetry import make_run_folder, open_telemetry
from dlrm.trainer import NUM_SCALARS, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all, from torchrun's environment; alone without it."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read RANK, LOCAL_RANK and WORLD_SIZE."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )


@dataclass(frozen=True)
class Inputs:
    """What is known, checked and open before ranks meet."""

    config: Config
    recipe: str
    ranks: Ranks
    device: torch.device
    manifest: DatasetManifest
    loader: DataLoader
    test_loader: DataLoader
    source: RowGroupSource | None

    def close(self) -> None:
        """Stop background threads and let go of files."""
        self.loader.close()
        self.test_loader.close()
        if isinstance(self.source, CachedSource):
            self.source.close()


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this rank.

    Raises:
        ValueError: cuda is asked for and not there, or there are more local ranks than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device is cuda, but torch finds no GPU here; set train.device=cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {ranks.local_rank} has no GPU of its own: there are {torch.cuda.device_count()}; "
            "start at most that many processes with --nproc-per-node"
        )
    return torch.device("cuda", ranks.local_rank)


def prepare(config: Config, recipe: str, ranks: Ranks) -> Inputs:
    """Check the configuration against machine and data, and open the data.

    Raises:
        ValueError: says what to change.
    """
    data = config.data
    device = resolve_device(config.train.device, ranks)
    config.sharding.check_device(device.type)
    if data.global_batch_size % ranks.world_size:
        raise ValueError(
            f"data.global_batch_size {data.global_batch_size} cannot be divided among {ranks.world_size} "
            f"ranks; choose a multiple of {ranks.world_size}"
        )
    manifest = read_manifest(data.uri)
    test_days = data.test_days or manifest.days[-1:]
    train_days = data.train_days or tuple(day for day in manifest.days if day not in set(test_days))
    if not train_days:
        raise ValueError(
            f"{data.uri} has only day {list(manifest.days)}, which is the test day; prepare more days, "
            "or set data.train_days and data.test_days"
        )
    _check_tables(config, manifest)
    source = _cached_source(config, manifest)
    _check_first_rows(data.uri, manifest.on_days(train_days), source)
    batch_size = data.global_batch_size // ranks.world_size
    open_loader = partial(
        DataLoader,
        data.uri,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=device.type == "cuda",
        source=source,
    )
    loader_config = LoaderConfig(
        batch_size=batch_size,
        window_batches=data.window_batches,
        shuffle=data.shuffle,
        seed=config.train.seed,
        prefetch=data.prefetch_batches,
    )
    test_config = LoaderConfig(
        batch_size=batch_size, shuffle=False, drop_last=False, prefetch=data.prefetch_batches
    )
    return Inputs(
        config=config,
        recipe=recipe,
        ranks=ranks,
        device=device,
        manifest=manifest,
        loader=open_loader(loader_config, days=train_days),
        test_loader=open_loader(test_config, days=test_days),
        source=source,
    )


def _check_tables(config: Config, manifest: DatasetManifest) -> None:
    limit = config.tables.max_rows
    large = [feature for feature in manifest.features if limit and feature.rows > limit]
    if large:
        raise ValueError(
            f"table {large[0].name} has {large[0].rows:,} rows, more than tables.max_rows {limit:,}; prepare "
            f"the data with --cap {limit}, or raise tables.max_rows"
        )


def _cached_source(config: Config, manifest: DatasetManifest) -> CachedSource | None:
    data = config.data
    if not data.cache_folder:
        return None
    return CachedSource(
        ParquetSource(data.uri, manifest),
        CacheConfig(
            folder=Path(data.cache_folder),
            disk_limit_bytes=int(data.cache_disk_gb * 1e9),
            memory_limit_bytes=int(data.cache_memory_gb * 1e9),
        ),
    )


def _check_first_rows(uri: str, manifest: DatasetManifest, source: RowGroupSource | None) -> None:
    """Read the first row group, so that a wrong schema is found now and not in the middle of a step."""
    part = manifest.parts[0]
    if source is not None:
        decode(source.read(part, 0), manifest, part.path)
        return
    files = ParquetSource(uri, manifest)
    try:
        decode(files.read(part, 0), manifest, part.path)
    finally:
        files.close()


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


def shard(inputs: Inputs) -> DistributedModelParallel:
    """The model of this run, its tables laid over the ranks, its initial values those of the seed."""
    config, device = inputs.config, inputs.device
    dtype = arithmetic_dtype(config.train.precision)
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, inputs.manifest.features, len(inputs.manifest.dense), dtype)
    sharder = make_sharder(config.tables, device, dtype)
    plan = make_plan(model, sharder, config.sharding, device, inputs.loader.config.batch_size)
    if inputs.ranks.rank == 0:
        logger.info("tables:\n%s", format_plan(placements(plan, model)))
    sharded = DistributedModelParallel(
        model, device=device, plan=plan, sharders=[sharder], init_data_parallel=False
    )
    initialize_tables(sharded, config.train.seed)
    for features in sharded.modules():
        if isinstance(features, PooledFeatures):  # each with a dtype of its own
            use_host_lookups([group.emb_module for group in table_groups(features)], features.dtype)
    return sharded


def build(inputs: Inputs, stop: StopSignal) -> Trainer:
    """Everything the training loop holds; all ranks call it together."""
    config, ranks = inputs.config, inputs.ranks
    model = shard(inputs)
    total_steps = len(inputs.loader) * config.train.epochs
    if config.train.max_steps:
        total_steps = min(total_steps, config.train.max_steps)
    telemetry = open_telemetry(
        ranks.rank,
        _agreed_run_folder(config, inputs.recipe, ranks.rank),
        recipe=inputs.recipe,
        config=config.to_dict(),
        total_samples=total_steps * config.data.global_batch_size,
        device=inputs.device,
        log_every_steps=config.train.log_every_steps,
        best_auc=_best_auc(inputs.test_loader.manifest),
    )
    return Trainer(
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


def _agreed_run_folder(config: Config, recipe: str, rank: int) -> Path:
    folder: list[Any] = [None]
    if rank == 0:
        try:
            folder = [make_run_folder(Path(config.train.run_folder), recipe, datetime.now())]
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
