"""A whole job: what is left to do, done by worker processes, and the manifest when all is there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from data.criteo import CATEGORY_NAMES
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, read_manifest
from data.prepare.config import PrepareConfig
from data.prepare.convert import COMPRESSION, ROW_GROUP_ROWS, ConvertSpan
from data.prepare.inputs import PIECE_BYTES, RawFile, Span, find_inputs
from data.prepare.pieces import PieceRecord, durable_file
from data.prepare.pool import Task, WorkerPool
from data.prepare.state import MAKER, close_state, is_finished, locked, open_state

REJECTS_NAME = "rejects.jsonl"
VOCABULARY_FOLDER = "vocabulary"
SHORTEST_LINE_BYTES = 41
"""A label, 39 tabs and a line end: bounds the lines that bytes not yet read can hold."""

MakeTask = Callable[[Span, tuple[PieceRecord, ...]], Task]
"""A task from a span and its finished pieces."""


def prepare(config: PrepareConfig) -> DatasetManifest:
    """Make a prepared data set, or finish the one that was begun; a finished one is left as it is.

    Raises:
        ValueError: the input or the folder is not what it should be, or too many lines are bad.
        OSError: the disk is full or fails.
        WorkerDiedError: a worker process was killed.
    """
    inputs = find_inputs(config.raw, config.num_days)
    identity = _identity(config, inputs)
    with locked(config.out):
        if is_finished(config.out, identity):
            close_state(config.out)
            return read_manifest(str(config.out))
        state = open_state(config.out, identity)
        with WorkerPool(config.num_processes) as pool:
            job = _Job(config, inputs, state, pool)
            manifest = job.run(identity)
        close_state(config.out)
        return manifest


def _identity(config: PrepareConfig, inputs: Sequence[RawFile]) -> dict[str, Any]:
    return {
        **config.identity,
        "inputs": [raw.identity for raw in inputs],
        "layout": {"piece_bytes": PIECE_BYTES, "row_group_rows": ROW_GROUP_ROWS, "compression": COMPRESSION},
        "versions": {name: metadata.version(name) for name in ("polars", "pyarrow")},
    }


class _Job:
    def __init__(
        self, config: PrepareConfig, inputs: Sequence[RawFile], state: Path, pool: WorkerPool
    ) -> None:
        self._config, self._inputs, self._state, self._pool = config, inputs, state, pool

    def run(self, identity: Mapping[str, Any]) -> DatasetManifest:
        out, config = self._config.out, self._config
        rule, table_rows, files = self._ids()
        records_folder = self._state / "pieces"

        def convert(span: Span, finished: tuple[PieceRecord, ...]) -> Task:
            return ConvertSpan(
                span=span,
                finished=finished,
                out=out,
                records=records_folder,
                rule=rule,
                table_rows=table_rows,
                block_bytes=config.block_bytes,
            )

        records = self._pass("prepare", records_folder, convert)
        rejects = self._collect_rejects(records_folder, records)
        self._check_bad(records, self._unread_bytes(records))
        parts = tuple(_part(record) for record in records if record.row_groups)
        if not parts:
            raise ValueError("the input holds not one good line")
        manifest = DatasetManifest(
            features=tuple(
                Feature(name=name, rows=rows) for name, rows in zip(CATEGORY_NAMES, table_rows, strict=True)
            ),
            parts=parts,
            provenance={"maker": MAKER, "identity": identity, "rejects": rejects, "files": files},
        )
        with durable_file(out / MANIFEST_NAME) as sink:
            sink.write(manifest.to_json().encode())
        return manifest

    def _ids(self) -> tuple[IdRule, tuple[int, ...], list[dict[str, Any]]]:
        """The id rule, the tables' rows, and what the manifest says of files made for it."""
        config = self._config
        if config.ids == "modulo":
            return ModuloIds(config.static_table_rows), config.static_table_rows, []
        if config.ids == "hash":
            return HashIds(config.static_table_rows), config.static_table_rows, []
        paths = self._make_vocabulary()
        rows = tuple(vocabulary_size(path) for path in paths)
        files = [_describe(config.out, path) for path in paths]
        return VocabularyIds(paths), rows, files

    def _make_vocabulary(self) -> list[Path]:
        config, records_folder = self._config, self._state / "counts"

        def count(span: Span, finished: tuple[PieceRecord, ...]) -> Task:
            return CountSpan(
                span=span, finished=finished, records=records_folder, block_bytes=config.block_bytes
            )

        records = self._pass("count", records_folder, count)
        self._check_bad(records, self._unread_bytes(records))
        tasks = [
            RankCategory(
                name=name,
                runs=tuple(run_path(records_folder, record.name, name) for record in records),
                scratch=records_folder,
                path=config.out / VOCABULARY_FOLDER / f"{name}.npy",
                min_count=config.min_count,
                cap=config.cap,
            )
            for name in CATEGORY_NAMES
        ]
        self._pool.run(tasks, lambda position, progress: True)
        return [task.path for task in tasks]

    def _pass(self, title: str, folder: Path, make: MakeTask) -> list[PieceRecord]:
        """Do what is left of one pass over the input.

        Returns:
            The records of its pieces in time order: of all pieces, or of some if it stopped because too many
            lines are bad.
        """
        folder.mkdir(parents=True, exist_ok=True)
        before = read_records(folder)
        spans = [span for raw in self._inputs for span in plan(raw)]
        finished = [_finished_of(span, before) for span in spans]
        left = [index for index, span in enumerate(spans) if not _is_done(span, finished[index])]
        watch = _Watch(title, spans, left, list(before.values()), self._config.max_bad_ratio)
        try:
            self._pool.run([make(spans[index], finished[index]) for index in left], watch)
        finally:
            watch.close()
        return _in_time_order(read_records(folder).values())

    def _unread_bytes(self, records: Sequence[PieceRecord]) -> int:
        """Bytes of the inputs, as stored, that the pass has not read: 0 unless it stopped early."""
        found = {record.name: record for record in records}
        spans = [span for raw in self._inputs for span in plan(raw)]
        return sum(_stored_bytes(span) for span in spans if not _is_done(span, _finished_of(span, found)))

    def _check_bad(self, records: Sequence[PieceRecord], unread_bytes: int) -> None:
        """Raise ValueError if too many lines are bad, or unknown many are lost."""
        num_lines = sum(record.num_lines for record in records)
        reasons = sum((Counter(record.num_rejects) for record in records), Counter[str]())
        num_bad, allowed = reasons.total(), self._config.max_bad_ratio
        where = f"See {self._config.out / REJECTS_NAME} for every one with its file and line number. "
        if reasons["truncated"] and allowed < 1:
            broken = [record for record in records if "truncated" in record.num_rejects]
            readable = {
                last.raw_name: sum(record.num_lines for record in records if record.raw_name == last.raw_name)
                - 1
                for last in broken
            }
            raise ValueError(
                "; ".join(
                    f"{name} is cut off or damaged after {count:,} lines" for name, count in readable.items()
                )
                + ". Nobody knows how many lines are lost, so no share of bad lines can be promised. Get the file "
                "again and start in a new --out, or take what is readable with --max-bad-ratio 1"
            )
        if unread_bytes or num_bad > allowed * num_lines:
            by_reason = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
            raise ValueError(
                f"{num_bad:,} of {num_lines:,} lines are bad ({by_reason}), more than --max-bad-ratio {allowed:g} "
                f"allows{' whatever is in the rest of the input' if unread_bytes else ''}. {where}"
                "Repair the input and start in a new --out, or go on with a higher --max-bad-ratio"
            )

    def _collect_rejects(self, folder: Path, records: Sequence[PieceRecord]) -> dict[str, Any]:
        """Join the pieces' bad lines into one file, with line numbers of the whole raw files."""
        lines_before: Counter[str] = Counter()
        with durable_file(self._config.out / REJECTS_NAME) as sink:
            for record in records:
                path = record_path(folder, record.name, REJECTS_SUFFIX)
                if path.exists():
                    with path.open(encoding="utf-8") as stream:
                        for line in stream:
                            reject = json.loads(line)
                            reject["line"] += lines_before[record.raw_name]
                            sink.write((json.dumps(reject, ensure_ascii=False) + "\n").encode())
                lines_before[record.raw_name] += record.num_lines
        reasons = sum((Counter(record.num_rejects) for record in records), Counter[str]())
        return {
            "path": REJECTS_NAME,
            "num_bytes": sink.num_bytes,
            "sha256": sink.sha256,
            "num_lines": sum(record.num_lines for record in records),
            "num_rejects": dict(reasons),
        }


class _Watch:
    """Follows a pass: shows how far it is, and stops it when too many lines are bad whatever comes."""

    def __init__(
        self,
        title: str,
        spans: Sequence[Span],
        left: Sequence[int],
        finished: Sequence[PieceRecord],
        max_bad_ratio: float,
    ) -> None:
        self._left = [spans[index] for index in left]
        self._max_bad_ratio = max_bad_ratio
        self._total = sum(_stored_bytes(span) for span in spans)
        self._base = self._total - sum(_stored_bytes(span) for span in self._left)
        self._done = [0] * len(self._left)
        self._num_lines = sum(record.num_lines for record in finished)
        self._num_bad = sum(sum(record.num_rejects.values()) for record in finished)
        self._display = ProgressDisplay(title, self._total, self._base)

    def __call__(self, position: int, progress: Progress | None) -> bool:
        num_lines = 0
        if progress is not None:
            span = self._left[position]
            self._done[position] = min(progress.stored_position - span.start, _stored_bytes(span))
            num_lines = progress.num_lines
            self._num_lines += num_lines
            self._num_bad += progress.num_bad
        done = self._base + sum(self._done)
        self._display.update(done, num_lines)
        if any(span.raw.compressed for span in self._left):
            return True  # nobody knows how many lines are left in a compressed file
        most_lines = self._num_lines + (self._total - done) / SHORTEST_LINE_BYTES
        return self._num_bad <= self._max_bad_ratio * most_lines

    def close(self) -> None:
        """End the display."""
        self._display.close()


def _finished_of(span: Span, records: Mapping[str, PieceRecord]) -> tuple[PieceRecord, ...]:
    if span.end is None:
        return tuple(record for record in records.values() if record.raw_name == span.raw.path.name)
    record = records.get(piece_name(span.day, span.index))
    return (record,) if record else ()


def _is_done(span: Span, finished: Sequence[PieceRecord]) -> bool:
    return bool(finished) if span.end is not None else any(record.last for record in finished)


def _stored_bytes(span: Span) -> int:
    return (span.raw.num_bytes if span.end is None else span.end) - span.start


def _in_time_order(records: Iterable[PieceRecord]) -> list[PieceRecord]:
    return sorted(records, key=lambda record: (record.day, record.index))


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
