"""What a run needs before its ranks communicate: device, data and loaders, checked against the configuration.

Mistakes of the user are found here, before a process group exists that could hang.
"""

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from cpr.checkpoint.state.changes import UNCHANGED, Changes
from data.batch import Batch
from data.cache import CacheConfig, CachedSource
from data.dataset import DatasetManifest
from data.loader import DataLoader, LoaderConfig, ParquetSource, RowGroupSource
from data.loader.assemble import Assembler
from data.loader.columns import Rows
from data.loader.decode import decode
from data.loader.order import Window
from data.loader.source import check_labels
from data.stream.agreement import Rules
from data.stream.injection import Injection
from data.stream.loader import StreamLoader
from data.stream.sharing import gather_by, share_by
from dlrm.config.dataset import open_manifest, split_days
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks, resolve_device
from dlrm.models.build import model_class
from dlrm.pipeline.halves import half_sizes
from dlrm.sharding.pooled import table_name

MOST_NAME_BYTES: Final = 150
"""Of a table's name: with its path in the model and a prefix, it is the name of a folder."""

FIRST_SAMPLES: Final = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """Configuration, device and opened data of a run."""

    config: Config
    recipe: str
    ranks: Ranks
    device: torch.device
    manifest: DatasetManifest
    loader: DataLoader | StreamLoader
    test_loader: DataLoader
    source: CachedSource | None
    resume: Path | None = None
    """Folder of the run to resume."""
    changes: Changes = UNCHANGED
    """How the model may differ from what it loads."""
    ids: Mapping[str, float] = field(default_factory=dict)
    """Mean number of ids per sample by feature, from the first rows; 1 for features that are missing."""
    first: Batch | None = None
    """`FIRST_SAMPLES` of the first samples of the training days, to try a model of the user on."""

    def close(self) -> None:
        """Stop background threads and close files."""
        self.loader.close()
        self.test_loader.close()
        if self.source is not None:
            self.source.close()


def prepare(
    config: Config,
    recipe: str,
    ranks: Ranks,
    resume: Path | None = None,
    changes: Changes = UNCHANGED,
) -> Inputs:
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
    if config.train.pipeline == "waves":
        half_sizes(data.global_batch_size // ranks.world_size)
    model_class(config.model.kind)  # a class of the user is imported on every rank, or refused
    manifest = open_manifest(data)
    check_labels(data.uri, manifest)
    train_days, test_days = split_days(config, manifest)
    if (overlap := sorted(set(train_days) & set(test_days))) and ranks.rank == 0:
        logger.warning(
            "days %s are trained and tested: metrics on them say nothing about new data. Leave them out of "
            "data.train_days, or set data.test_days",
            overlap,
        )
    _check_tables(config, manifest)
    source = _cached_source(config, manifest)
    try:
        shown = train_days or manifest.days  # the records of a stream are like those
        rows = _check_files(data.uri, manifest, (shown, test_days), source)
        loader, test_loader = _open_loaders(config, ranks, device, source, (train_days, test_days), manifest)
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
        ids=_mean_ids(rows, manifest),
        first=_first_batch(rows, manifest),
        resume=resume,
        changes=changes,
    )


def _open_loaders(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    source: RowGroupSource | None,
    days: tuple[Sequence[int], Sequence[int]],
    manifest: DatasetManifest,
) -> tuple[DataLoader | StreamLoader, DataLoader]:
    """Open the loaders of the training days, or of what streams in, and of the test days."""
    data = config.data
    batch_size = data.global_batch_size // ranks.world_size
    open_loader = partial(
        DataLoader,
        data.uri,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device,
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
    test_loader = open_loader(test, days=days[1])
    if config.stream.uri:
        return _open_stream(config, train, ranks, device, manifest), test_loader
    return open_loader(train, days=days[0]), test_loader


def _open_stream(
    config: Config, loader: LoaderConfig, ranks: Ranks, device: torch.device, manifest: DatasetManifest
) -> StreamLoader:
    if device.type != "cpu":
        raise ValueError(
            "stream.uri makes batches on the CPU, and has never run with a GPU: set train.device=cpu"
        )
    stream, injection = config.stream, None
    if stream.inject and ranks.world_size > 1:
        injection = Injection(stream.inject, ranks.rank, loader.seed, gather_by(ranks.world_size))
    # imported here, by a worker: the server that workers are forked of must not have the threads of polars
    opening = importlib.import_module("data.stream.opening")
    return StreamLoader(
        opening.open_stream(stream.uri, manifest, config.data.uri, is_encoded=stream.rows == "encoded"),
        manifest,
        loader,
        Rules(
            global_batch=config.data.global_batch_size,
            wait_s=stream.wait_s,
            end_after_s=stream.end_after_s or None,
        ),
        backlog=-(-stream.backlog // ranks.world_size),
        policy=stream.keep,
        rank=ranks.rank,
        world_size=ranks.world_size,
        share=share_by(ranks.world_size),
        injection=injection,
    )


def _check_tables(config: Config, manifest: DatasetManifest) -> None:
    tables, names = config.tables, [feature.name for feature in manifest.features]
    if not names:
        raise ValueError(
            f"{config.data.uri} has dense columns but no features with ids, and embedding tables are what is "
            "trained here; add a [[sparse]] column to its schema, e.g. a number that was cut into ranges"
        )
    if long := [name for name in names if len(table_name("", name).encode()) > MOST_NAME_BYTES]:
        raise ValueError(
            f"{long[0][:50]}... is too long for the name of a table, which is part of a folder's name in "
            f"saves; rename the column to {MOST_NAME_BYTES} bytes at most"
        )
    if unknown := set(tables.dynamic) - {"*", *names}:
        raise ValueError(
            f"tables.dynamic names {min(unknown)}, which the data lacks; its features are {', '.join(names)}"
        )
    static = [feature for feature in manifest.features if not tables.is_dynamic(feature.name)]
    if unbounded := [feature.name for feature in static if not feature.rows]:
        raise ValueError(
            f"{unbounded[0]} has raw ids, any 64-bit integers, and so needs a dynamic table: name it in "
            "tables.dynamic (all features: ['*']), or make the data with another rule of ids"
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
) -> Rows:
    """Check that all files exist, and read the first rows of both days; return those to train on.

    A missing file or a wrong schema is found now, and not days later in the first evaluation.
    """
    files = ParquetSource(uri, manifest)
    try:
        files.check_files(manifest.on_days([*days[0], *days[1]]).parts)
        trained, _ = (_first_rows(source or files, manifest.on_days(each)) for each in days)
    finally:
        files.close()
    return trained


def _mean_ids(rows: Rows, manifest: DatasetManifest) -> dict[str, float]:
    """Mean number of ids per sample by feature."""
    named = zip(manifest.features, rows.ids, strict=True)
    return {feature.name: float(column.lengths().mean()) for feature, column in named}


def _first_batch(rows: Rows, manifest: DatasetManifest) -> Batch:
    """The first samples of each label as a batch; the same ones again if there are too few."""
    names = [feature.name for feature in manifest.features]
    clicked = rows.label.values > 0
    order = np.concatenate([np.flatnonzero(clicked == each)[: FIRST_SAMPLES // 2] for each in (True, False)])
    order = np.resize(order, FIRST_SAMPLES)
    window = Window(rows=order, order=order, batch_size=FIRST_SAMPLES, num_valid=FIRST_SAMPLES)
    return Assembler(names, FIRST_SAMPLES, pin_memory=False).batches([rows], window)[0]


def _first_rows(source: RowGroupSource, manifest: DatasetManifest) -> Rows:
    part = manifest.parts[0]
    first = next(number for number, num_rows in enumerate(part.row_groups) if num_rows)
    return decode(source.read(part, first), manifest, part.path)
