"""What a run needs before its ranks communicate: device, data and loaders, checked against the configuration.

Mistakes of the user are found here, before a process group exists that could hang.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from data.cache import CacheConfig, CachedSource
from data.dataset import DatasetManifest
from data.loader import DataLoader, LoaderConfig, ParquetSource, RowGroupSource
from data.loader.columns import Rows
from data.loader.decode import decode
from dlrm.config.dataset import open_manifest, split_days
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks, resolve_device


@dataclass(frozen=True)
class Inputs:
    """Configuration, device and opened data of a run."""

    config: Config
    recipe: str
    ranks: Ranks
    device: torch.device
    manifest: DatasetManifest
    loader: DataLoader
    test_loader: DataLoader
    source: CachedSource | None
    resume: Path | None = None
    """Folder of the run to resume."""
    ids: Mapping[str, float] = field(default_factory=dict)
    """Mean number of ids per sample by feature, from the first rows; 1 for features that are missing."""

    def close(self) -> None:
        """Stop background threads and close files."""
        self.loader.close()
        self.test_loader.close()
        if self.source is not None:
            self.source.close()


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
    """Open the loaders of the training days and of the test days."""
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
    """Check that all files exist and read the first rows of each part; return mean ids per sample by feature.

    A missing file or a wrong schema is found now, and not days later in the first evaluation.
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
