"""Opens a run for evaluation and prediction: its configuration, data, and model with a save loaded.

Nothing of the run is changed, so that a run can be opened from a read-only folder and while it still trains.
The model is sharded over the ranks that open it, however many had trained it, without optimizer state and
outside of resident memory.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.load.weights import load_weights
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import NothingSavedError
from data.batch import Batch
from data.dataset import DatasetManifest, read_manifest
from data.loader import DataLoader, LoaderConfig, WithoutLabels
from data.loader.source import check_labels, columns_of_files
from dlrm.config.dataset import split_days
from dlrm.config.recipe import load_resumed
from dlrm.config.schema import COMPUTE_KERNELS, SHARDING_KINDS, Config, DenseConfig, ShardingConfig
from dlrm.inference.columns import check_columns
from dlrm.launch.device import Ranks, resolve_device
from dlrm.models.contract import objective_of
from dlrm.sharding.splitting.planning.saved_choice import CHOICE_NAME
from dlrm.telemetry.folder import trained_manifest
from dlrm.training.build import end_process_group, shard, start_process_group
from dlrm.training.data import Inputs
from dlrm.training.encoding import refuse_other_encoding

logger = logging.getLogger(__name__)

Save = Literal["newest", "best"]


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run's configuration, opened data, and model with a save loaded; the same on all ranks."""

    folder: Path
    recipe: str
    config: Config
    """As the run was trained."""
    uri: str
    """Of the data; the configured one if that is the same place."""
    manifest: DatasetManifest
    """The opened days of the data."""
    loader: DataLoader
    """Batches of this rank in the order of the data, each sample once; the last batch is padded."""
    model: nn.Module
    """The sharded model in evaluation mode; every rank calls it equally often."""
    state: State
    """The loaded save."""
    device: torch.device
    ranks: Ranks

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Compute fp32 logits `[B]` of a batch, with those of padded samples; a collective.

        Raises:
            ValueError: the model gives none.
        """
        moved = batch.to(self.device, non_blocking=True)
        logits = objective_of(self.model).logits(self.model(moved.dense, moved.sparse))
        if logits is None:
            raise ValueError(f"model.kind: {self.config.model.kind} gives no logits, so there are no scores")
        return logits


@contextmanager
def open_run(
    folder: Path,
    data_uri: str | None = None,
    days: Sequence[int] | Literal["test", "all"] = "test",
    save: Save = "newest",
    *,
    step: int | None = None,
    labels: bool = True,
) -> Iterator[OpenedRun]:
    """Open a run on the ranks of torchrun's environment, or in this process alone; all ranks call it alike.

    Makes the default process group, and destroys it at the end, unless there is one.

    Args:
        folder: the run's.
        data_uri: prepared data set with the columns of the run's; None: that of the run.
        days: of the data; `test`: the test days of the run's own data, and all days of other data.
        save: `newest`, or `best` by `train.keep_best`.
        step: training step of the save; None: the last one.
        labels: whether labels are needed; if not, and the data has none, those of the batches are 0.

    Raises:
        ValueError: a mistake of the user; says what to change.
        OSError: the data cannot be read.
        CheckpointError: no save can be read, or it is of another model.
    """
    recipe, config = load_resumed(folder)
    ranks = Ranks.from_environment()
    device = device_of(config, ranks)
    uri, manifest = _open_data(folder, config, data_uri, days)
    saves = config.checkpoint
    source = saves.best_directory(folder) if save == "best" else saves.directory(folder)
    has_choice = (folder / CHOICE_NAME).exists()
    untrained = _without_optimizers(config, device, has_choice)
    loader = _open_loader(untrained, ranks, device, uri, manifest, labels)
    try:
        with joined(ranks, device):
            inputs = Inputs(
                config=untrained,
                recipe=recipe,
                ranks=ranks,
                device=device,
                manifest=manifest,
                loader=loader,
                test_loader=loader,
                source=None,
            )
            model = shard(inputs, initialize=False, folder=folder if has_choice else None)
            yield OpenedRun(
                folder=folder,
                recipe=recipe,
                config=config,
                uri=uri,
                manifest=manifest,
                loader=loader,
                state=_load(model, source, step, save),
                model=model.eval(),
                device=device,
                ranks=ranks,
            )
    finally:
        loader.close()


@contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """A process group of all ranks for the block, unless there is one."""
    if dist.is_initialized():
        yield
        return
    start_process_group(ranks, device)
    try:
        yield
    finally:
        end_process_group()


def _load(model: nn.Module, uri: str, step: int | None, save: Save) -> State:
    try:
        state = load_weights(model, open_storage(uri), step)
    except NothingSavedError as error:
        is_best = save == "best"
        advice = "train.keep_best, or take the newest save" if is_best else "checkpoint.every_steps"
        raise ValueError(f"{error}. Train it with {advice}") from error
    if dist.get_rank() == 0:
        logger.info("loaded the model of step %d from %s", state.step, uri)
    return state


def _open_data(
    folder: Path, config: Config, data_uri: str | None, days: Sequence[int] | Literal["test", "all"]
) -> tuple[str, DatasetManifest]:
    """URI and manifest of the data, restricted to the days."""
    is_own = data_uri is None or _place(data_uri) == _place(config.data.uri)
    uri = config.data.uri if is_own or data_uri is None else data_uri
    manifest = read_manifest(uri)
    if is_own:
        refuse_other_encoding(folder, manifest, uri)
    trained = trained_manifest(folder)
    if trained is not None:
        check_columns(config.tables, trained, manifest, uri)
    elif not is_own:
        _compare(config, manifest, uri)
    if days == "test" and is_own:
        return uri, manifest.on_days(split_days(config, manifest)[1])
    return uri, manifest if isinstance(days, str) else manifest.on_days(days)


def _place(uri: str) -> str:
    """The same for all ways to write a local path."""
    return uri if "://" in uri else str(Path(uri).resolve())


def _compare(config: Config, manifest: DatasetManifest, uri: str) -> None:
    """Compare with what is now at the place of a run's data, of which the run folder has kept nothing."""
    try:
        trained = read_manifest(config.data.uri)
    except (OSError, ValueError) as error:
        logger.warning(
            "the data set that the run was trained on cannot be read (%s): whether %s has its columns in the "
            "same order is not checked, only that the tables have as many rows as those of the save",
            error,
            uri,
        )
    else:
        check_columns(config.tables, trained, manifest, uri)


def device_of(config: Config, ranks: Ranks) -> torch.device:
    """The device of the run; the CPU where the run had a GPU and there is none here."""
    name = config.train.device
    return resolve_device("auto" if name == "cuda" and not torch.cuda.is_available() else name, ranks)


def _without_optimizers(config: Config, device: torch.device, has_choice: bool) -> Config:
    """The configuration with optimizers without state, and sharding kinds and kernels that the device has."""
    sharding = config.sharding
    if sharding.strategy == "auto" and not has_choice:
        sharding = replace(sharding, strategy="torchrec", wire_dtype="fp32")
    kinds = tuple(kind for kind in sharding.kinds if kind in SHARDING_KINDS[device.type])
    kernels = tuple(kernel for kernel in sharding.kernels if kernel in COMPUTE_KERNELS[device.type])
    return replace(
        config,
        tables=replace(config.tables, optimizer="sgd", admit_after=1),
        dense=DenseConfig(optimizer="sgd"),
        sharding=replace(
            sharding, kinds=kinds or ShardingConfig.kinds, kernels=kernels or ShardingConfig.kernels
        ),
    )


def _open_loader(
    config: Config, ranks: Ranks, device: torch.device, uri: str, manifest: DatasetManifest, labels: bool
) -> DataLoader:
    data = config.data
    if labels:
        check_labels(uri, manifest)
    has_labels = labels or manifest.label in columns_of_files(uri, manifest)
    return DataLoader(
        uri,
        LoaderConfig(
            batch_size=-(-data.global_batch_size // ranks.world_size),
            shuffle=False,
            drop_last=False,
            window_batches=data.window_batches,
            prefetch=data.prefetch_batches,
        ),
        rank=ranks.rank,
        world_size=ranks.world_size,
        days=manifest.days,
        device=device,
        source=None if has_labels else WithoutLabels(uri, manifest),
    )
