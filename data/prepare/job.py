"""Runs a whole job: the remaining work in worker processes, then the manifest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any, Final

from data.criteo import CATEGORY_NAMES, NUM_CATEGORIES
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part, read_manifest
from data.jobs.cluster import WorkersFor, connected
from data.jobs.files import described, durable_file
from data.jobs.folder import begun, is_finished, locked
from data.jobs.location import Location
from data.jobs.tasks import Workers, local_workers
from data.prepare.config import PrepareConfig
from data.prepare.convert import COMPRESSION, ROW_GROUP_ROWS, ConvertSpan, part_path
from data.prepare.parse.ids import IdRule, VocabularyIds, hash_ids, modulo_ids, raw_ids
from data.prepare.parse.inputs import PIECE_BYTES, RawFile, find_inputs
from data.prepare.parse.walk import SpanTask
from data.prepare.passes import Files, run_pass
from data.prepare.pieces import PieceRecord
from data.prepare.rejects import check_rejects, collect_rejects
from data.prepare.vocabulary import CountSpan, RankCategory, run_path, vocabulary_size

MAKER: Final = "data.prepare"
STATE_FOLDER: Final = ".prepare"
VOCABULARY_FOLDER: Final = "vocabulary"


def prepare(config: PrepareConfig) -> DatasetManifest:
    """Make a prepared data set, or finish an interrupted one.

    A finished data set is left unchanged, unless a file is missing or has another size.

    Raises:
        ValueError: the input or the folder is invalid, or too many lines are bad.
        OSError: the disk is full or fails.
        WorkerDiedError: a worker process was killed.
        ClusterError: the scheduler or all workers of the cluster were lost.
    """
    if config.cluster is None:
        return _prepare(config, lambda num, *_: local_workers(num, "data.prepare.convert"))
    with connected(config.cluster, config.memory_bytes) as cluster:
        return _prepare(
            replace(
                config,
                raw=tuple(raw.absolute() for raw in config.raw),
                out=config.out.absolute(),
                cluster=None,
                num_processes=cluster.most_threads,
            ),
            cluster.workers,
        )


def _prepare(config: PrepareConfig, workers_for: WorkersFor) -> DatasetManifest:
    inputs = find_inputs(config.raw, config.num_days)
    identity = _identity(config, inputs)
    sizes = [(raw.path, raw.num_bytes) for raw in inputs]
    with locked(config.out):
        state = config.out / STATE_FOLDER
        if not is_finished(config.out, STATE_FOLDER, MAKER, identity):
            with (
                begun(config.out, STATE_FOLDER, identity),
                workers_for(config.processes, state, sizes) as workers,
            ):
                _Job(config, inputs, state, workers).run(identity)
        state.delete_folder()
    return read_manifest(config.out.root)


def _identity(config: PrepareConfig, inputs: Sequence[RawFile]) -> dict[str, Any]:
    return {
        **config.identity,
        "inputs": [raw.identity for raw in inputs],
        "layout": {"piece_bytes": PIECE_BYTES, "row_group_rows": ROW_GROUP_ROWS, "compression": COMPRESSION},
        "polars": metadata.version("polars"),  # decides the bytes of the Parquet files
    }


class _Job:
    def __init__(
        self, config: PrepareConfig, inputs: Sequence[RawFile], state: Location, workers: Workers
    ) -> None:
        self._config, self._inputs, self._state, self._workers = config, inputs, state, workers

    def run(self, identity: Mapping[str, Any]) -> None:
        """Do the remaining work, and write the manifest last."""
        out = self._config.out
        rule, table_rows, files = self._ids()
        records, rejects = self._pass(
            "prepare",
            self._state / "pieces",
            partial(ConvertSpan, out=out, rule=rule),
            lambda record: [part_path(out, record.name)] if record.row_groups else [],
        )
        parts = tuple(_part(record) for record in records if record.row_groups)
        if not parts:
            raise ValueError("the input holds not one good line")
        tables = zip(CATEGORY_NAMES, table_rows, strict=True)
        manifest = DatasetManifest(
            features=tuple(Feature(name=name, rows=rows) for name, rows in tables),
            parts=parts,
            provenance={"maker": MAKER, "identity": identity, "rejects": rejects, "files": files},
        )
        with durable_file(out / MANIFEST_NAME) as sink:
            sink.write(manifest.to_json().encode())

    def _pass(
        self, title: str, folder: Location, task: Callable[..., SpanTask], files: Files
    ) -> tuple[Sequence[PieceRecord], dict[str, Any]]:
        """Run a pass; returns its records and the manifest's entry about bad lines."""
        config = self._config
        make = partial(task, records=folder, block_bytes=config.block_bytes)
        result = run_pass(title, self._inputs, folder, make, files, self._workers, config.max_bad_ratio)
        rejects = collect_rejects(config.out, folder, result.records)
        check_rejects(config.out, result, config.max_bad_ratio)
        return result.records, rejects

    def _ids(self) -> tuple[IdRule, tuple[int, ...], list[dict[str, Any]]]:
        """The id rule, the rows of the tables, and manifest entries of the rule's files."""
        config = self._config
        if config.ids == "modulo":
            return modulo_ids(config.static_table_rows), config.static_table_rows, []
        if config.ids == "hash":
            return hash_ids(config.static_table_rows), config.static_table_rows, []
        if config.ids == "raw":
            return raw_ids(), (0,) * NUM_CATEGORIES, []
        paths = self._make_vocabulary()
        rows = tuple(vocabulary_size(path) for path in paths)
        return VocabularyIds(paths), rows, [described(path) for path in paths]

    def _make_vocabulary(self) -> list[Location]:
        config, folder = self._config, self._state / "counts"

        records, _ = self._pass(
            "count",
            folder,
            CountSpan,
            lambda record: [run_path(folder, record.name, name) for name in CATEGORY_NAMES],
        )
        tasks = [
            RankCategory(
                name=name,
                runs=tuple(run_path(folder, record.name, name) for record in records),
                scratch=folder,
                path=config.out / VOCABULARY_FOLDER / f"{name}.npy",
                min_count=config.least_count,
                cap=config.max_rows,
            )
            for name in CATEGORY_NAMES
        ]
        self._workers.run(tasks, lambda position, progress: True)
        return [task.path for task in tasks]


def _part(record: PieceRecord) -> Part:
    return Part(
        path=f"{record.name}.parquet",
        day=record.day,
        num_rows=record.num_rows,
        row_groups=record.row_groups,
        num_bytes=record.num_bytes,
        sha256=record.sha256,
    )
