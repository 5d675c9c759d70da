"""Runs a whole job: reads the files to runs, makes vocabularies and means, writes the data set in order."""

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow.parquet as pq

from data.convert.config import ConvertConfig
from data.convert.counts import RankFeature
from data.convert.like import copy_vocabularies, vocabulary_digests
from data.convert.moments import Moments
from data.convert.order import days_of
from data.convert.read.files import InputFile, find_inputs
from data.convert.rejects import check_rejects, collect_rejects, refuse_hopeless
from data.convert.runs import ReadFile, RunRecord, read_records, run_name
from data.convert.write import GROUPS_PER_FILE, Slices, WritePart, group_rows, open_runs
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part, read_manifest
from data.jobs.cluster import WorkersFor, connected
from data.jobs.display import Meter
from data.jobs.files import described, durable_file
from data.jobs.folder import begun, is_finished, locked
from data.jobs.location import Location
from data.jobs.tasks import Workers, local_workers
from data.schema import Schema
from data.schema.definition import DEFAULT_MAX_ROWS, DEFAULT_MIN_COUNT
from data.schema.encoder import vocabulary_path
from data.schema.ids import FIRST_VOCABULARY_ID

MAKER: Final = "data.convert"
STATE_FOLDER: Final = ".convert"
_PRELOAD: Final = "data.convert.write"
_VALUE_BYTES: Final = 80
"""Memory of a worker for a value of a vocabulary, besides the bytes of its text."""


def convert(config: ConvertConfig) -> DatasetManifest:
    """Make a data set, or finish an interrupted one.

    A finished data set is left unchanged, unless a file is missing or has another size.

    Raises:
        ValueError: the input or the folder is invalid, or too many rows are bad.
        OSError: the disk is full or fails.
        WorkerDiedError: a worker process was killed.
        ClusterError: the scheduler or all workers of the cluster were lost.
    """
    if config.cluster is None:
        return _convert(config, lambda num_processes, *_: local_workers(num_processes, _PRELOAD))
    with connected(config.cluster, config.memory_bytes) as cluster:
        return _convert(
            replace(
                config,
                files=tuple(file.absolute() for file in config.files),
                out=config.out.absolute(),
                like=config.like.absolute() if config.like is not None else None,
                cluster=None,
                num_processes=cluster.most_threads,
            ),
            cluster.workers,
        )


def _convert(config: ConvertConfig, workers_for: WorkersFor) -> DatasetManifest:
    inputs = find_inputs(config.files, config.schema)
    identity = {**config.identity, "inputs": [file.identity for file in inputs]}
    if config.like is not None:
        identity["like"] = vocabulary_digests(config.like)
    with locked(config.out):
        state = config.out / STATE_FOLDER
        if not is_finished(config.out, STATE_FOLDER, MAKER, identity):
            refuse_hopeless(inputs, config.schema)  # before the folder belongs to this schema
            with begun(config.out, STATE_FOLDER, identity):
                _Job(config, inputs, state, workers_for).run(identity)
        state.delete_folder()
    return read_manifest(config.out.root)


class _Job:
    def __init__(
        self, config: ConvertConfig, inputs: Sequence[InputFile], state: Location, workers_for: WorkersFor
    ) -> None:
        self._config, self._inputs, self._state = config, inputs, state
        self._runs = state / "runs"
        self._workers_for, self._token = workers_for, secrets.token_hex(8)
        self._sizes = [(file.path, file.num_bytes) for file in inputs]

    def run(self, identity: Mapping[str, Any]) -> None:
        """Do the remaining work, and write the manifest last."""
        config = self._config
        with self._workers_for(config.processes, self._state, self._sizes) as workers:
            records = self._read(workers)
            rejects = collect_rejects(config.out, self._runs, records)
            check_rejects(config.out, records, config.max_bad_ratio)
            if not any(record.num_rows for record in records):
                raise ValueError("the input holds not one good row")
            schema = _with_moments(config.schema, records)
            vocabularies = (
                copy_vocabularies(config.like, config.out, schema)
                if config.like is not None
                else self._rank(workers, records)
            )
        sizes = {name: _metadata(config.out / path) for name, path in vocabularies.items()}
        with durable_file(self._state / "schema.json") as sink:
            sink.write(json.dumps(schema.to_json()).encode())
        tasks = self._plan(records)
        num_writers = config.writers(sum(map(_vocabulary_bytes, sizes.values())))
        with self._workers_for(num_writers, self._state, self._sizes) as workers:
            parts = list(self._write(workers, tasks))
        rows = {name: FIRST_VOCABULARY_ID + size.num_rows for name, size in sizes.items()}
        manifest = DatasetManifest(
            label=schema.label.name,
            dense=tuple(dense.name for dense in schema.dense),
            features=tuple(
                Feature(name=one.name, rows=rows.get(one.name, one.rows or 0), weights=one.weights_name)
                for one in schema.sparse
            ),
            parts=tuple(parts),
            schema=schema.to_json(),
            provenance={
                "maker": MAKER,
                "identity": identity,
                "rejects": rejects,
                "files": [described(config.out / path) for path in vocabularies.values()],
            },
        )
        with durable_file(config.out / MANIFEST_NAME) as sink:
            sink.write(manifest.to_json().encode())

    def _read(self, workers: Workers) -> list[RunRecord]:
        """Read what is left of the files."""
        schema = self._config.schema
        suffixes = [f"{one.name}.counts" for one in schema.sparse if one.ids == "vocabulary"]
        suffixes += ["times"] if schema.time is not None else []
        finished = _finished_runs(self._runs, self._inputs, suffixes)
        tasks = []
        for position, file in enumerate(self._inputs):
            of_file = [record for record in finished if record.file == file.name]
            if not any(record.last for record in of_file):
                done = max((record.end for record in of_file), default=0)
                tasks.append(
                    ReadFile(
                        file=file,
                        position=position,
                        finished=done,
                        schema=schema,
                        folder=self._runs,
                        block_bytes=self._config.block_bytes,
                    )
                )
        left = sum(task.file.num_bytes for task in tasks)
        total = sum(file.num_bytes for file in self._inputs)
        with Meter("read", len(tasks), total, total - left) as meter:
            workers.run(tasks, meter)
        return read_records(self._runs)

    def _rank(self, workers: Workers, records: Sequence[RunRecord]) -> dict[str, str]:
        """Make the vocabularies; returns their paths by feature."""
        names = [record.name for record in records if record.num_rows]
        tasks = [
            RankFeature(
                name=one.name,
                runs=tuple(self._runs / f"{name}.{one.name}.counts" for name in names),
                scratch=self._runs,
                path=self._config.out / vocabulary_path(one.name),
                min_count=DEFAULT_MIN_COUNT if one.min_count is None else one.min_count,
                max_rows=DEFAULT_MAX_ROWS if one.max_rows is None else one.max_rows,
            )
            for one in self._config.schema.sparse
            if one.ids == "vocabulary"
        ]
        workers.run(tasks, lambda position, progress: True)
        return {task.name: vocabulary_path(task.name) for task in tasks}

    def _plan(self, records: Sequence[RunRecord]) -> list[WritePart]:
        """The files of the data set, in order."""
        schema = self._config.schema
        runs = [record for record in records if record.num_rows]
        names, sizes = [run.name for run in runs], [run.num_rows for run in runs]
        whole = open_runs(self._runs, names, sizes, self._token, timed=schema.time is not None)
        rows = group_rows(schema, sum(sizes), sum(run.num_values for run in runs))
        tasks = []
        for day, (starts, stops) in days_of(schema, whole, [run.days for run in runs]).items():
            there = (stops > starts).nonzero()[0]
            slices = Slices(
                runs=tuple(names[at] for at in there),
                starts=tuple(int(starts[at]) for at in there),
                stops=tuple(int(stops[at]) for at in there),
            )
            total, step = int((stops - starts).sum()), rows * GROUPS_PER_FILE
            tasks += [
                WritePart(
                    out=self._config.out,
                    state=self._state,
                    day=day,
                    index=index,
                    rows=range(start, min(start + step, total)),
                    group_rows=rows,
                    slices=slices,
                    job=self._token,
                )
                for index, start in enumerate(range(0, total, step))
            ]
        return tasks

    def _write(self, workers: Workers, tasks: Sequence[WritePart]) -> Iterator[Part]:
        """Write the files that are left; returns the manifest's entries of all."""
        left = [task for task in tasks if task.finished() is None]
        total = sum(len(task.rows) for task in tasks)
        done = total - sum(len(task.rows) for task in left)
        with Meter("write", len(left), total, done) as meter:
            workers.run(left, meter)
        for task in tasks:
            part = task.finished()
            assert part is not None, "written above"
            yield part


def _finished_runs(folder: Location, inputs: Sequence[InputFile], suffixes: Sequence[str]) -> list[RunRecord]:
    """Finished runs of an earlier start; those that lost a file, and those after them, are removed."""
    found = {record.name: record for record in read_records(folder)}
    kept = []
    for position, _ in enumerate(inputs):
        start = 0
        while (record := found.pop(run_name(position, start), None)) is not None:
            needed = ["rejects.jsonl", *(["rows", *suffixes] if record.num_rows else [])]
            if any((folder / f"{record.name}.{suffix}").size() is None for suffix in needed):
                found[record.name] = record
                break
            kept.append(record)
            if record.last:
                break
            start = record.end
    for name in found:
        (folder / f"{name}.json").delete()
    return kept


def _with_moments(schema: Schema, records: Sequence[RunRecord]) -> Schema:
    """The schema with the means and deviations of the columns to be standardized."""
    made = []
    for dense in schema.dense:
        parts = [Moments(*record.moments[dense.name]) for record in records if dense.name in record.moments]
        if parts:
            whole = Moments.sum(parts)
            made.append(replace(dense, mean=whole.mean, std=whole.std))
        else:
            made.append(dense)
    return replace(schema, dense=tuple(made))


def _vocabulary_bytes(file: pq.FileMetaData) -> int:
    stored = sum(file.row_group(group).total_byte_size for group in range(file.num_row_groups))
    return int(2 * stored + _VALUE_BYTES * file.num_rows)


def _metadata(file: Location) -> pq.FileMetaData:
    with file.open() as stream:
        return pq.read_metadata(stream)


def bad_rows(manifest: DatasetManifest) -> Counter[str]:
    """Bad rows of a data set by reason."""
    return Counter(manifest.provenance["rejects"]["num_rejects"])
