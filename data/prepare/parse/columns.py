r"""Parses blocks of raw lines to typed columns with polars, strictly.

polars is fast but lenient: it fills short lines with nulls, skips empty ones, and accepts a plus sign or a
blank before a number. The result of a block is thus used only if the numbers of tabs, line ends and rows
agree (polars refuses lines of more than 40 fields, so that then no line is shorter either) and the block has
none of the bytes that polars ignores. Any other block goes through `vet`, and its good lines are parsed;
tests compare both ways for arbitrary bytes.

A bad line takes some hundred bytes of memory, however short it is, so that a block of many lines is vetted in
slices.
"""

import codecs
from collections.abc import Iterator
from typing import Final

import numpy as np
import polars as pl

from data.criteo import CATEGORY_NAMES, DENSE_NAMES, LABEL, NUM_CATEGORIES, NUM_DENSE, NUM_FIELDS
from data.prepare.parse.lines import BadLine, judge_line
from data.text.streams import MAX_LINE_BYTES

_OVERLOOKED: Final = b"+ \r"
"""Bytes that polars accepts and the grammar does not; at the start of a text also a byte order mark."""
_ZEROS: Final = b"0" * (MAX_LINE_BYTES // NUM_FIELDS - 32)
"""A line beyond `MAX_LINE_BYTES` with values all in range must hold a field with that many leading zeros."""
_SCHEMA: Final = {
    LABEL: pl.String,
    **dict.fromkeys(DENSE_NAMES, pl.Int64),
    **dict.fromkeys(CATEGORY_NAMES, pl.String),
}
_LABEL: Final = pl.col(LABEL).replace_strict({"0": 0, "1": 1}, return_dtype=pl.UInt8)
_CATEGORIES: Final = pl.col(CATEGORY_NAMES).str.to_integer(base=16, dtype=pl.UInt32, strict=True)
_SURELY_GOOD: Final = (
    rf"\A[01](?:\t(?:-?[0-9]{{1,18}})?){{{NUM_DENSE}}}(?:\t[0-9a-fA-F]{{0,8}}){{{NUM_CATEGORIES}}}\z"
)
"""Pattern of nearly all good lines; other lines go to `judge_line`."""
_SLICE_LINE_BYTES: Final = 160
"""Bytes of a block per line of a slice; lines of a usual log are longer."""


def read_block(block: bytes) -> Iterator[tuple[pl.DataFrame, list[BadLine]]]:
    r"""Parse a block of lines, in slices of lines that follow one another.

    Args:
        block: whole lines, each ended by `\n` or `\r\n`.

    Yields:
        The good lines of a slice in order, with columns label (UInt8), int_0.. (Int64) and cat_0..
        (UInt32), null where a field is empty; and its bad lines in order, with their index in the slice.
    """
    block = block.replace(b"\r\n", b"\n") if b"\r" in block else block
    frame = None if _ZEROS in block else _parse(block)
    if frame is not None:
        yield frame, []
        return
    for lines in _slices(block):
        good, bad = vet(lines)
        frame = _parse(good)
        assert frame is not None, "a line passed the vetting that the parser refuses"
        yield frame, bad


def _slices(block: bytes) -> Iterator[bytes]:
    """The lines of a block, at most one for `_SLICE_LINE_BYTES` of it at once."""
    max_lines = max(len(block) // _SLICE_LINE_BYTES, 1)
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord(b"\n"))[max_lines - 1 :: max_lines] + 1
    start = 0
    for end in [*ends.tolist(), len(block)]:
        if end > start:
            yield block[start:end]
        start = end


def _parse(block: bytes) -> pl.DataFrame | None:
    """The block's columns, or None if any line of it is bad."""
    codes = np.frombuffer(block, np.uint8)  # several times faster to count in than bytes.count
    num_lines, num_tabs = (int(np.count_nonzero(codes == ord(byte))) for byte in "\n\t")
    if num_tabs != (NUM_FIELDS - 1) * num_lines or any(byte in block for byte in _OVERLOOKED):
        return None
    if block.startswith(codecs.BOM_UTF8):
        return None
    try:
        raw = pl.read_csv(block, has_header=False, separator="\t", quote_char=None, schema=_SCHEMA)
        frame = raw.with_columns(_LABEL, _CATEGORIES)
    except pl.exceptions.NoDataError:
        frame = pl.DataFrame(schema=_SCHEMA).with_columns(_LABEL, _CATEGORIES)
    except pl.exceptions.PolarsError:
        return None
    return frame if frame.height == num_lines and not frame[LABEL].null_count() else None


def vet(block: bytes) -> tuple[bytes, list[BadLine]]:
    r"""Separate the good lines of a block from the bad ones.

    Args:
        block: whole lines, each ended by `\n`.

    Returns:
        The good lines as a block, and the bad ones in order.
    """
    # Latin-1 keeps one character per byte, so that a broken line stays one line and cannot match
    texts = block.decode("latin-1").split("\n")
    texts.pop()
    sure = pl.Series(texts, dtype=pl.String).str.contains(_SURELY_GOOD)
    bad = []
    for index in (~sure).arg_true().to_list():
        line = texts[index].encode("latin-1")
        reason = judge_line(line)
        if reason is not None:
            bad.append(BadLine(index, reason, line))
    for line_ in reversed(bad):
        del texts[line_.index]
    texts.append("")
    return "\n".join(texts).encode("latin-1"), bad
