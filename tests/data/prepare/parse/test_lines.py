"""The grammar of a raw line."""

import pytest

from data.prepare.parse.lines import judge_line
from data.text.streams import MAX_LINE_BYTES

GOOD = [b"1", *[b"5"] * 13, *[b"0aB3"] * 26]


def line_with(position: int, field: bytes) -> bytes:
    return b"\t".join([*GOOD[:position], field, *GOOD[position + 1 :]])


LARGEST, SMALLEST = b"9223372036854775807", b"-9223372036854775808"
FIELDS = [
    (1, None, [b"", b"0", b"-3", b"-0", b"007", LARGEST, SMALLEST]),
    (13, "number", [b"+5", b" 5", b"5 ", b"-", b"--1", b"1.0", b"1e5", b"0x5", b"a", b"9223372036854775808"]),
    (13, "number", [b"-9223372036854775809", b"\x005", b'"5"', b"5\r", b"-00" + LARGEST + b"0"]),
    (39, None, [b"", b"0", b"ffffffff", b"FFFFFFFF", b"68fd1e64", b"00000000000ff"]),
    (14, "hex", [b"+5", b"-5", b" 5", b"0x5", b"g", b"100000000", b'"5"', b"\xc3\xa9"]),
    (0, "label", [b"", b"2", b"-1", b"01", b"1.0", b"\xef\xbb\xbf1"]),
]


@pytest.mark.parametrize(
    ("position", "reason", "field"),
    [(position, reason, field) for position, reason, fields in FIELDS for field in fields],
)
def test_fields_that_count_and_that_do_not(position, reason, field):
    assert judge_line(line_with(position, field)) == reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "field_count"),
        (b"\t".join(GOOD[1:]), "field_count"),
        (b"\t".join([*GOOD, b""]), "field_count"),
        (line_with(20, b"\xff"), "broken_utf8"),
        (line_with(1, b"0" * MAX_LINE_BYTES), "too_long"),
    ],
)
def test_lines_that_are_wrong_as_a_whole(line, reason):
    assert judge_line(line) == reason
