"""What a run needs before ranks meet: device, data and loaders, checked against the configuration.

What a user can get wrong is found here, while no process group exists that could hang.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from data.cache import CacheConfig, CachedSource
from data.dataset import DatasetManifest, read_manifest
from data.loader import DataLoader, LoaderConfig, ParquetSource, RowGroupSource
from data.loader.columns import Rows
from data.loader.decode import decode
from dlrm.config.schema import Config, DataConfig


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
    source: CachedSource | None
    resume: Path | None = None
    """Folder of the run to go on with."""
    ids: Mapping[str, float] = field(default_factory=dict)
    """Ids that a sample has on average, by feature, in the first rows; one where a feature is not named."""

    def close(self) -> None:
        """Stop background threads and let go of files."""
        self.loader.close()
        self.test_loader.close()
        if self.source is not None:
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


def open_manifest(data: DataConfig) -> DatasetManifest:
    """The manifest of the data; errors name the key that says where it is.

    Raises:
        ValueError: there is no data set.
        OSError: it cannot be read.
    """
    try:
        return read_manifest(data.uri)
    except ValueError as error:
        raise ValueError(f"data.uri: {error}") from error
    except OSError as error:
        raise OSError(f"data.uri: {error}") from error


def split_days(data: DataConfig, manifest: DatasetManifest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The days to train on and those to evaluate on.

    Raises:
        ValueError: none is left to train on.
    """
    test_days = data.test_days or manifest.days[-1:]
    train_days = data.train_days or tuple(day for day in manifest.days if day not in set(test_days))
    if not train_days:
        raise ValueError(
            f"{data.uri} has only day {list(manifest.days)}, which is the test day; prepare more days, "
            "or set data.train_days and data.test_days"
        )
    return train_days, test_days


def steps_in_epoch(data: DataConfig, manifest: DatasetManifest) -> int:
    """Batches that the training days give, as the loader counts them.

    Raises:
        ValueError: there are no days to train on.
    """
    train_days, _ = split_days(data, manifest)
    return manifest.on_days(train_days).num_rows // data.global_batch_size


def total_samples(config: Config, steps_in_epoch: int) -> int:
    """Samples that the whole run trains on, over all ranks."""
    steps = steps_in_epoch * config.train.epochs
    return min(steps, config.train.max_steps or steps) * config.data.global_batch_size


def prepare(config: Config, recipe: str, ranks: Ranks, resume: Path | None = None) -> Inputs:
    """Check the configuration against machine and data, and open the data.

    Raises:
        ValueError: says what to change.
        OSError: a file of the data is missing or damaged; names it.
    """
    data = config.data
    device = resolve_device(config.train.device, ranks)
    config.sharding.check_device(device.type)
    if data.global_batch_size % ranks.world_size:
        raise ValueError(
            f"data.global_batch_size {data.global_batch_size} cannot be divided among {ranks.world_size} "
            f"ranks; choose a multiple of {ranks.world_size}"
        )
    manifest = open_manifest(data)
    train_days, test_days = split_days(data, manifest)
    _check_tables(config, manifest)
    source = _cached_source(config, manifest)
    try:
        ids = _check_files(data.uri, manifest, (train_days, test_days), source)
        loader, test_loader = _open_loaders(config, ranks, device, source, (train_days, test_days))
    except BaseException:
        if source is not None:
            source.close()
        raise
    return Inputs(
        config=config,
        recipe=recipe,
        ranks=ranks,
        device=device,
        manifest=manifest,
        loader=loader,
        test_loader=test_loader,
        source=source,
        ids=ids,
        resume=resume,
    )


def _open_loaders(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    source: RowGroupSource | None,
    days: tuple[Sequence[int], Sequence[int]],
) -> tuple[DataLoader, DataLoader]:
    """The loaders of the training days and of the test days."""
    data = config.data
    batch_size = data.global_batch_size // ranks.world_size
    open_loader = partial(
        DataLoader,
        data.uri,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=device.type == "cuda",
        source=source,
    )
    train = LoaderConfig(
        batch_size=batch_size,
        window_batches=data.window_batches,
        order=data.order,
        shuffle=data.shuffle,
        seed=config.train.seed,
        prefetch=data.prefetch_batches,
    )
    test = LoaderConfig(
        batch_size=batch_size,
        shuffle=False,
        drop_last=False,
        window_batches=data.window_batches,
        prefetch=data.prefetch_batches,
    )
    return open_loader(train, days=days[0]), open_loader(test, days=days[1])


def _check_tables(config: Config, manifest: DatasetManifest) -> None:
    tables, names = config.tables, [feature.name for feature in manifest.features]
    if unknown := set(tables.dynamic) - {"*", *names}:
        raise ValueError(
            f"tables.dynamic names {min(unknown)}, which the data lacks; its features are {', '.join(names)}"
        )
    static = [feature for feature in manifest.features if not tables.is_dynamic(feature.name)]
    if unbounded := [feature.name for feature in static if not feature.rows]:
        raise ValueError(
            f"{unbounded[0]} has raw ids, any 64-bit integers, and so needs a dynamic table: name it in "
            "tables.dynamic, or prepare the data with another rule of --ids"
        )
    limit = tables.max_rows
    large = [feature for feature in static if limit and feature.rows > limit]
    if large:
        raise ValueError(
            f"table {large[0].name} has {large[0].rows:,} rows, more than tables.max_rows {limit:,}; make "
            f"the data with fewer (data.prepare: --cap {limit}; data.synthetic: a smaller --scale), or raise "
            "tables.max_rows"
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


def _check_files(
    uri: str,
    manifest: DatasetManifest,
    days: tuple[Sequence[int], Sequence[int]],
    source: RowGroupSource | None,
) -> dict[str, float]:
    """Look for all files, and into the first of the training days and of the test days.

    So what is missing, or of a wrong schema, is found now and not in the middle of a step, or in the first
    evaluation, which may be days away.

    Args:
        uri: of the data set.
        manifest: of it.
        days: to train on, and to evaluate on.
        source: gives row groups; None: the files do.

    Returns:
        Ids a sample, on average, by feature, in the training days.
    """
    files = ParquetSource(uri, manifest)
    try:
        files.check_files(manifest.on_days([*days[0], *days[1]]).parts)
        trained, _ = (_first_rows(source or files, manifest.on_days(each)) for each in days)
    finally:
        files.close()
    return {
        feature.name: float(column.lengths().mean())
        for feature, column in zip(manifest.features, trained.ids, strict=True)
    }


def _first_rows(source: RowGroupSource, manifest: DatasetManifest) -> Rows:
    part = manifest.parts[0]
    return decode(source.read(part, 0), manifest, part.path)
