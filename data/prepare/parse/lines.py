r"""The grammar of a raw Criteo line, and the reasons to refuse a line.

A line is 40 fields separated by tabs: a label `0` or `1`, 13 integers, 26 hexadecimal categories.
Integers and categories may be empty, which means missing. An integer is an optional minus and
decimal digits, in the range of 64 bits; a category is hexadecimal digits of either case, below 2^32. There
is no quoting, no plus sign, no blank and no comment. A line ends with `\n` or `\r\n`; the last
one may lack it. `data.text` takes a byte order mark off the first line of a file. `judge_line` checks one
line; `columns` does the same for a block of lines, fast.
"""

import re
from dataclasses import dataclass
from typing import Final

from data.criteo import NUM_DENSE, NUM_FIELDS
from data.text.streams import MAX_LINE_BYTES

TRUNCATED: Final = "truncated"
"""Reason for the line in which a file's compressed data is truncated or damaged; given by `walk`."""
TRAILING_BYTES: Final = "trailing_bytes"
"""Reason for bytes after the compressed data of a file, which are no line; given by `walk`."""
REASONS: Final = (
    "too_long",
    "broken_utf8",
    "field_count",
    "label",
    "number",
    "hex",
    TRUNCATED,
    TRAILING_BYTES,
)
"""Reasons to refuse a line, in the order of the checks."""

_INTEGER: Final = re.compile(rb"(-?)(?=[0-9])0*+([0-9]{0,19})")
"""Sign and digits of an integer; int() of very many digits would be slow."""
_CATEGORY: Final = re.compile(rb"0*+[0-9a-fA-F]{0,8}")


@dataclass(frozen=True)
class BadLine:
    """A refused line."""

    index: int
    """Position in its block, counting from 0."""
    reason: str
    """One of `REASONS`."""
    text: bytes
    """The line without its end."""


def judge_line(line: bytes) -> str | None:
    r"""The reason to refuse a line; None for a good one.

    Args:
        line: one line without its `\n` or `\r\n`.
    """
    if len(line) > MAX_LINE_BYTES:
        return "too_long"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "broken_utf8"
    fields = line.split(b"\t")
    if len(fields) != NUM_FIELDS:
        return "field_count"
    return _judge_values(fields)


def _judge_values(fields: list[bytes]) -> str | None:
    if fields[0] not in (b"0", b"1"):
        return "label"
    if not all(_is_integer(field) for field in fields[1 : 1 + NUM_DENSE]):
        return "number"
    if not all(_CATEGORY.fullmatch(field) for field in fields[1 + NUM_DENSE :]):
        return "hex"
    return None


def _is_integer(field: bytes) -> bool:
    found = _INTEGER.fullmatch(field)
    return not field or (found is not None and -(2**63) <= int(b"0".join(found.groups())) < 2**63)
