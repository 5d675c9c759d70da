"""The grammar of a raw line."""

import pytest

from data.prepare.parse.lines import MAX_LINE_BYTES, judge_line

GOOD = [b"1", *[b"5"] * 13, *[b"0aB3"] * 26]


def line_with(position: int, field: bytes) -> bytes:
    return b"\t".join([*GOOD[:position], field, *GOOD[position + 1 :]])


@pytest.mark.parametrize(
    "field", [b"", b"0", b"-3", b"-0", b"007", b"9223372036854775807", b"-9223372036854775808"]
)
def test_integers_that_count(field):
    assert judge_line(line_with(1, field)) is None


@pytest.mark.parametrize(
    "field",
    [
        b"+5",
        b" 5",
        b"5 ",
        b"-",
        b"--1",
        b"1.0",
        b"1e5",
        b"0x5",
        b"a",
        b"9223372036854775808",
        b"\x005",
        b'"5"',
        b"5\r",
    ],
)
def test_integers_that_do_not(field):
    assert judge_line(line_with(13, field)) == "number"


@pytest.mark.parametrize("field", [b"", b"0", b"ffffffff", b"FFFFFFFF", b"68fd1e64", b"00000000000ff"])
def test_categories_that_count(field):
    assert judge_line(line_with(39, field)) is None


@pytest.mark.parametrize("field", [b"+5", b"-5", b" 5", b"0x5", b"g", b"100000000", b'"5"', b"\xc3\xa9"])
def test_categories_that_do_not(field):
    assert judge_line(line_with(14, field)) == "hex"


@pytest.mark.parametrize("label", [b"", b"2", b"-1", b"01", b"1.0", b"\xef\xbb\xbf1"])
def test_labels_that_do_not_count(label):
    assert judge_line(line_with(0, label)) == "label"


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
