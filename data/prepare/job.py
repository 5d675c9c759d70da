"""Runs a whole job: the remaining work in worker processes, then the manifest."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from data.criteo import CATEGORY_NAMES, NUM_CATEGORIES
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part, read_manifest
from data.prepare.config import PrepareConfig
from data.prepare.convert import COMPRESSION, ROW_GROUP_ROWS, ConvertSpan, part_is_there
from data.prepare.parse.ids import HashIds, IdRule, ModuloIds, RawIds
from data.prepare.parse.inputs import PIECE_BYTES, RawFile, Span, find_inputs
from data.prepare.parse.lookup import VocabularyIds
from data.prepare.passes import IsThere, MakeTask, PassResult, run_pass
from data.prepare.pieces import PieceRecord, durable_file, remove_leftovers
from data.prepare.pool import WorkerPool
from data.prepare.rejects import check_rejects, collect_rejects
from data.prepare.state import MAKER, close_state, is_finished, locked, open_state
from data.prepare.vocabulary import CountSpan, RankCategory, run_path, runs_are_there, vocabulary_size

VOCABULARY_FOLDER: Final = "vocabulary"


def prepare(config: PrepareConfig) -> DatasetManifest:
    """Make a prepared data set, or finish an interrupted one; a finished data set is left unchanged.

    Raises:
        ValueError: the input or the folder is invalid, or too many lines are bad.
        OSError: the disk is full or fails.
        WorkerDiedError: a worker process was killed.
    """
    inputs = find_inputs(config.raw, config.num_days)
    identity = _identity(config, inputs)
    with locked(config.out):
        if not is_finished(config.out, identity):
            state = open_state(config.out, identity)
            try:
                with WorkerPool(config.processes) as pool:
                    _Job(config, inputs, state, pool).run(identity)
            except BaseException:
                remove_leftovers(config.out)  # of workers that were killed while writing
                raise
        close_state(config.out)
    return read_manifest(str(config.out))


def _identity(config: PrepareConfig, inputs: Sequence[RawFile]) -> dict[str, Any]:
    return {
        **config.identity,
        "inputs": [raw.identity for raw in inputs],
        "layout": {"piece_bytes": PIECE_BYTES, "row_group_rows": ROW_GROUP_ROWS, "compression": COMPRESSION},
        "polars": metadata.version("polars"),  # decides the bytes of the Parquet files
    }


class _Job:
    def __init__(
        self, config: PrepareConfig, inputs: Sequence[RawFile], state: Path, pool: WorkerPool
    ) -> None:
        self._config, self._inputs, self._state, self._pool = config, inputs, state, pool

    def run(self, identity: Mapping[str, Any]) -> None:
        """Do the remaining work, and write the manifest last."""
        out = self._config.out
        rule, table_rows, files = self._ids()
        folder = self._state / "pieces"
        result = self._convert(folder, rule)
        rejects = collect_rejects(out, folder, result.records)
        check_rejects(out, result, self._config.max_bad_ratio)
        parts = tuple(_part(record) for record in result.records if record.row_groups)
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

    def _convert(self, folder: Path, rule: IdRule) -> PassResult:
        config = self._config

        def convert(span: Span, finished: tuple[PieceRecord, ...]) -> ConvertSpan:
            return ConvertSpan(
                span=span,
                finished=finished,
                out=config.out,
                records=folder,
                rule=rule,
                block_bytes=config.block_bytes,
            )

        return self._pass("prepare", folder, convert, partial(part_is_there, config.out))

    def _pass(self, title: str, folder: Path, make: MakeTask, is_there: IsThere) -> PassResult:
        return run_pass(title, self._inputs, folder, make, is_there, self._pool, self._config.max_bad_ratio)

    def _ids(self) -> tuple[IdRule, tuple[int, ...], list[dict[str, Any]]]:
        """The id rule, the rows of the tables, and manifest entries of the rule's files."""
        config = self._config
        if config.ids == "modulo":
            return ModuloIds(config.static_table_rows), config.static_table_rows, []
        if config.ids == "hash":
            return HashIds(config.static_table_rows), config.static_table_rows, []
        if config.ids == "raw":
            return RawIds(), (0,) * NUM_CATEGORIES, []
        paths = self._make_vocabulary()
        rows = tuple(vocabulary_size(path) for path in paths)
        return VocabularyIds(paths), rows, [_describe(config.out, path) for path in paths]

    def _make_vocabulary(self) -> list[Path]:
        config, folder = self._config, self._state / "counts"

        def count(span: Span, finished: tuple[PieceRecord, ...]) -> CountSpan:
            return CountSpan(span=span, finished=finished, records=folder, block_bytes=config.block_bytes)

        result = self._pass("count", folder, count, partial(runs_are_there, folder))
        collect_rejects(config.out, folder, result.records)
        check_rejects(config.out, result, config.max_bad_ratio)
        tasks = [
            RankCategory(
                name=name,
                runs=tuple(run_path(folder, record.name, name) for record in result.records),
                scratch=folder,
                path=config.out / VOCABULARY_FOLDER / f"{name}.npy",
                min_count=config.least_count,
                cap=config.max_rows,
            )
            for name in CATEGORY_NAMES
        ]
        self._pool.run(tasks, lambda position, progress: True)
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


def _describe(out: Path, path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": path.relative_to(out).as_posix(), "num_bytes": path.stat().st_size, "sha256": digest}
