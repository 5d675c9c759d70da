"""Conversion of durations, sizes and tables from and to text: `5.6m`, `1h30m`, `2.64 GB`."""

import math
import re
from collections.abc import Collection, Sequence
from typing import Final

UNITS_S: Final = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
"""Seconds in each unit that `parse_duration` accepts."""
SIZES: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
"""Bytes in each unit that `parse_size` accepts."""
SHOWN: Final = (("d", 86_400.0, 345_600.0), ("h", 3600.0, 3600.0), ("min", 60.0, 60.0), ("s", 1.0, 1.0))
"""Units of `duration_text` with their seconds, and the shortest duration shown in each."""
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")


def parse_duration(text: str) -> float:
    """Parse a duration into seconds.

    >>> parse_duration("5.6m"), parse_duration("1h30m"), parse_duration("2d")
    (336.0, 5400.0, 172800.0)

    Args:
        text: numbers with the units ms, s, m (or min), h or d.

    Raises:
        ValueError: the text is not a duration, negative, or lacks a unit.
    """
    rest, total = text.strip().lower(), 0.0
    while part := _PART.match(rest):
        number, unit = part.groups()
        if unit not in UNITS_S:
            break
        total += float(number) * UNITS_S[unit]
        rest = rest[part.end() :]
    if rest or not text.strip():
        raise ValueError(
            f"{text!r} is not a span of time; write a number with its unit: 90s, 5.6m, 28h, 2d or 1h30m"
        )
    return total


def duration_text(seconds: float) -> str:
    """Format a duration with three digits in a suitable unit.

    >>> duration_text(336), duration_text(161_280), duration_text(0.0042)
    ('5.6 min', '44.8 h', '4.2 ms')
    """
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, unit_s, least_s in SHOWN:
        if seconds >= least_s:
            return f"{_three_digits(seconds / unit_s)} {unit}"
    return f"{_three_digits(seconds * 1000)} ms"


def _three_digits(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def size_text(num_bytes: float) -> str:
    """Format a number of bytes with a decimal unit.

    >>> size_text(2_640_000_000), size_text(5e15)
    ('2.64 GB', '5,000 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{_three_digits(num_bytes)} TB"


def parse_size(text: str) -> int:
    """Parse a size into bytes, with decimal units as in `size_text`.

    >>> parse_size("4GB"), parse_size("1.5 kB")
    (4000000000, 1500)

    Raises:
        ValueError: the text is not a size, or lacks a unit.
    """
    part = _PART.fullmatch(text.strip().lower())
    if part is None or part[2] not in SIZES:
        raise ValueError(f"{text!r} is not a size; write a number with its unit: 500MB, 4GB or 1.5TB")
    return round(float(part[1]) * SIZES[part[2]])


def count_text(number: int, what: str) -> str:
    """Format a count of things, with a plural s.

    >>> count_text(1, "rank"), count_text(2000, "rank")
    ('1 rank', '2,000 ranks')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def share_text(share: float) -> str:
    """Format a share as a percentage with three digits.

    >>> share_text(0.0845), share_text(0.00529), share_text(0)
    ('8.45%', '0.529%', '0%')
    """
    return f"{100 * share:.3g}%"


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a text table.

    >>> align_columns([("name", "rows"), ("users", "9")])
    ['name   rows', 'users     9']

    Args:
        rows: cells of each row, of one length.
        left: columns aligned to the left; the others are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
