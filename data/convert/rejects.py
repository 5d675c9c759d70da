"""Collects the bad rows of a job in one file, and checks their share against the limit."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from data.convert.read.files import LOOK_BYTES, TRUNCATED, InputFile
from data.convert.runs import RunRecord
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.jobs.rejects import REJECTS_NAME, by_reason, rejects_entry, too_many
from data.schema import Schema
from data.schema.rows import read_rows

_HOPELESS_SHARE: Final = 0.5


def refuse_hopeless(inputs: Sequence[InputFile], schema: Schema) -> None:
    """Raise an error at the start if most of a file's first rows are bad.

    Raises:
        ValueError: that is so; the message has the most frequent reason.
    """
    for file in inputs:
        reasons: Counter[str] = Counter()
        num_good = 0
        for block in file.blocks(schema.columns, 0, LOOK_BYTES):
            try:
                rows = read_rows(block.frame, schema, to_train=True)
            except ValueError as error:
                raise ValueError(f"{file.path}: {error}") from error
            reasons.update([*rows.reasons.values(), *(bad.reason for bad in block.bad)])
            num_good += block.frame.height - len(rows.reasons)
            break
        if reasons.total() > _HOPELESS_SHARE * (num_good + reasons.total()):
            reason, count = reasons.most_common(1)[0]
            raise ValueError(
                f"{file.path} does not fit the schema: of its first {num_good + reasons.total():,} rows "
                f"{reasons.total():,} are bad, {count:,} because {reason}; correct the schema or the file"
            )


def collect_rejects(out: Location, folder: Location, records: Sequence[RunRecord]) -> dict[str, Any]:
    """Join the runs' bad rows into one file.

    Returns:
        The manifest's entry about bad rows.
    """
    with durable_file(out / REJECTS_NAME) as sink:
        for record in records:
            if record.num_rejects:
                sink.write((folder / f"{record.name}.rejects.jsonl").read())
    num_lines = sum(record.end - record.start for record in records)
    return rejects_entry(sink, num_lines, by_reason(records))


def check_rejects(out: Location, records: Sequence[RunRecord], max_bad_ratio: float) -> None:
    """Raise an error for too many bad rows, or for a truncated file.

    Raises:
        ValueError: too many rows are bad; the message has their number, reasons and file.
    """
    reasons = by_reason(records)
    cut_off = sorted({record.file for record in records if TRUNCATED in record.num_rejects})
    if cut_off and max_bad_ratio < 1:
        raise ValueError(
            f"{', '.join(cut_off)}: compressed data is cut off or damaged, and the number of lost rows is "
            "unknown. Get the file again and start in a new --out, or take what is readable with "
            "--max-bad-ratio 1"
        )
    num_rows = sum(record.end - record.start for record in records)
    if reasons.total() > max_bad_ratio * num_rows:
        bad = f"{reasons.total():,} of {num_rows:,} rows are bad"
        listed = "; ".join(f"{count:,}: {reason}" for reason, count in reasons.most_common())
        raise too_many(out, bad, listed, max_bad_ratio, "the input or the schema")
