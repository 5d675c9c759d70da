"""Runs the remaining work of one pass over the input, and follows its progress."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from data.jobs.display import ProgressDisplay
from data.jobs.location import Location
from data.jobs.tasks import Task, Workers
from data.prepare.parse.inputs import RawFile, Span, plan
from data.prepare.parse.walk import REJECTS_SUFFIX
from data.prepare.pieces import PieceRecord, Progress, piece_name, read_records, record_path

SHORTEST_LINE_BYTES: Final = 41
"""A label, 39 tabs and a line end: bounds the lines that bytes not yet read can hold."""

Files = Callable[[PieceRecord], list[Location]]
"""The files of a finished piece."""


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """Result of a pass."""

    records: tuple[PieceRecord, ...]
    """Records of its pieces, in time order."""
    complete: bool
    """False if it stopped early because too many lines are bad, whatever the rest may be."""


def run_pass(
    title: str,
    inputs: Sequence[RawFile],
    folder: Location,
    make: Callable[..., Task],
    files: Files,
    workers: Workers,
    max_bad_ratio: float,
) -> PassResult:
    """Run the remaining tasks of a pass.

    Args:
        title: for the progress display.
        inputs: the raw files.
        folder: of the pass's records.
        make: makes a task from `span` and its `finished` pieces.
        files: names the files of a finished piece.
        workers: run the tasks.
        max_bad_ratio: share of bad lines beyond which the job is going to fail.
    """
    before = _finished_before(folder, inputs, files)
    spans = [span for raw in inputs for span in plan(raw)]
    finished = {span: _finished_of(span, before) for span in spans}
    left = [span for span in spans if not _is_done(span, finished[span])]
    watch = _Watch(title, spans, left, tuple(before.values()), max_bad_ratio)
    try:
        workers.run([make(span=span, finished=finished[span]) for span in left], watch)
    finally:
        watch.close()
    after = read_records(folder)
    return PassResult(
        records=tuple(sorted(after.values(), key=lambda record: (record.day, record.index))),
        complete=all(_is_done(span, _finished_of(span, after)) for span in spans),
    )


class _Watch:
    """Shows the progress of a pass, and stops it when too many lines are bad in any case."""

    def __init__(
        self,
        title: str,
        spans: Sequence[Span],
        left: Sequence[Span],
        finished: Sequence[PieceRecord],
        max_bad_ratio: float,
    ) -> None:
        self._left = left
        self._max_bad_ratio = max_bad_ratio
        self._total = sum(_span_bytes(span) for span in spans)
        self._base = self._total - sum(_span_bytes(span) for span in self._left)
        self._reached = [Progress(stored_position=span.start, num_lines=0, num_bad=0) for span in left]
        self._num_lines = sum(record.num_lines for record in finished)
        self._num_bad = sum(sum(record.num_rejects.values()) for record in finished)
        self._display = ProgressDisplay(title, self._total, self._base)

    def __call__(self, position: int, progress: Progress | None) -> bool:
        num_lines = 0
        if progress is not None:
            before, self._reached[position] = self._reached[position], progress
            num_lines = progress.num_lines - before.num_lines
            self._num_lines += num_lines
            self._num_bad += progress.num_bad - before.num_bad
        done = self._base + sum(map(_done_bytes, self._left, self._reached))
        self._display.update(done, num_lines)
        if any(span.raw.compressed for span in self._left):
            return True  # the number of lines left in a compressed file is unknown
        most_lines = self._num_lines + (self._total - done) / SHORTEST_LINE_BYTES
        return self._num_bad <= self._max_bad_ratio * most_lines

    def close(self) -> None:
        """End the display."""
        self._display.close()


def _finished_before(folder: Location, inputs: Sequence[RawFile], files: Files) -> dict[str, PieceRecord]:
    """Finished pieces of an earlier start; records without their files are removed.

    Reading of a compressed file continues after its last piece, so that pieces after a lost one are lost too.
    """
    records = read_records(folder)
    stored = Location(folder.root).sizes() if records else {}
    compressed = {raw.path.name for raw in inputs if raw.compressed}
    broken_off: set[str] = set()
    for record in sorted(records.values(), key=lambda record: record.start):
        rejects = record_path(folder, record.name, REJECTS_SUFFIX)
        sizes = [stored.get(file.inner) for file in files(record)]
        whole = None not in sizes and sum(filter(None, sizes)) == record.num_bytes
        whole &= rejects.inner in stored or not record.num_rejects
        if whole and record.raw_name not in broken_off:
            continue
        broken_off |= {record.raw_name} & compressed
        record_path(folder, record.name).delete()
        del records[record.name]
    return records


def _finished_of(span: Span, records: Mapping[str, PieceRecord]) -> tuple[PieceRecord, ...]:
    if span.end is None:
        return tuple(record for record in records.values() if record.raw_name == span.raw.path.name)
    record = records.get(piece_name(span.day, span.index))
    return (record,) if record else ()


def _is_done(span: Span, finished: Sequence[PieceRecord]) -> bool:
    return bool(finished) if span.end is not None else any(record.last for record in finished)


def _done_bytes(span: Span, reached: Progress) -> int:
    return min(reached.stored_position - span.start, _span_bytes(span))


def _span_bytes(span: Span) -> int:
    return (span.raw.num_bytes if span.end is None else span.end) - span.start
