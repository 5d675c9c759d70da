"""Collects the bad lines of a job in one file, and checks their share against the limit."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from data.jobs.files import durable_file
from data.jobs.location import Location
from data.jobs.rejects import REJECTS_NAME, by_reason, rejects_entry, too_many
from data.prepare.parse.lines import TRAILING_BYTES, TRUNCATED
from data.prepare.parse.walk import REJECTS_SUFFIX
from data.prepare.passes import PassResult
from data.prepare.pieces import PieceRecord, record_path


def collect_rejects(out: Location, folder: Location, records: Sequence[PieceRecord]) -> dict[str, Any]:
    """Join the pieces' bad lines into one file, with line numbers of the whole raw files.

    Args:
        out: folder of the data set.
        folder: of the pass's records.
        records: of the pass, in time order.

    Returns:
        The manifest's entry about bad lines.
    """
    lines_before: Counter[str] = Counter()
    with durable_file(out / REJECTS_NAME) as sink:
        for record in records:
            stored = record_path(folder, record.name, REJECTS_SUFFIX)
            for line in stored.open() if record.num_rejects else ():
                reject = json.loads(line)
                reject["line"] += lines_before[record.raw_name]
                sink.write((json.dumps(reject, ensure_ascii=False) + "\n").encode())
            lines_before[record.raw_name] += record.num_lines
    num_lines = sum(record.num_lines for record in records)
    return rejects_entry(sink, num_lines, by_reason(records))


def check_rejects(out: Location, result: PassResult, max_bad_ratio: float) -> None:
    """Raise an error for too many bad lines, or for a truncated file.

    A truncated file has lost an unknown number of lines, so that no limit below 1 allows it. Bytes after a
    file's compressed data lose no line, so that they are reported but do not count.

    Raises:
        ValueError: too many lines are bad; the message has their number, reasons and file.
    """
    reasons = by_reason(result.records)
    if reasons[TRUNCATED] and max_bad_ratio < 1:
        raise ValueError(
            f"{_cut_off(result.records)}. The number of lost lines is unknown. Get the file again and "
            "start in a new --out, or take what is readable with --max-bad-ratio 1"
        )
    num_lines = sum(record.num_lines for record in result.records)
    num_bad = reasons.total() - reasons[TRAILING_BYTES]
    if not result.complete or num_bad > max_bad_ratio * num_lines:
        so_far = "" if result.complete else " read so far, and the rest cannot make up for it"
        bad = f"{num_bad:,} of {num_lines:,} lines{so_far} are bad"
        listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
        raise too_many(out, bad, listed, max_bad_ratio, "the input")


def _cut_off(records: Sequence[PieceRecord]) -> str:
    names = [record.raw_name for record in records if TRUNCATED in record.num_rejects]
    readable: Counter[str] = Counter()
    for record in records:
        readable[record.raw_name] += record.num_lines - record.num_rejects.get(TRUNCATED, 0)
    return "; ".join(f"{name} is cut off or damaged after {readable[name]:,} lines" for name in names)
