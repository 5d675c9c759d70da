"""Parsing a block of lines: the fast way and the vetting agree with the grammar, for any bytes."""

import codecs

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from data.criteo import COLUMN_NAMES
from data.prepare.parse.columns import _parse, read_block
from data.prepare.parse.lines import judge_line
from data.text.streams import MAX_LINE_BYTES
from tests.data.prepare.conftest import make_lines

SPOILERS = [
    b"+5", b" 5", b"5 ", b"0x5", b"-", b"--1", b"-0", b"1-", b"1e5", b"abcdefabc", b"0000000000ff",
    b"ffffffff", b"100000000", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808",
    b"-9223372036854775809", b"000000000000000000000000000007", b"\x00", b'"', b"'", b'"a\tb"', b"\r",
    b"\n", b"\r\n", b"\t", b"\xff", b"\xc3\xa9", b"2", b"01", b"", b"1.0", b"-5", b"F", b"-f", b"NaN",
    b"null", b"inf", b"#", b"1_0", b"\xef\xbb\xbf1", b"\x85",
]  # fmt: skip
GOOD_LINES = make_lines(20)


def reference(block: bytes) -> tuple[list[tuple[int | None, ...]], list[tuple[int, str]]]:
    """What a block holds by the grammar, a line and a field at a time."""
    good, bad = [], []
    for index, line in enumerate(block.split(b"\n")[:-1]):
        line = line.removesuffix(b"\r")  # noqa: PLW2901
        reason = judge_line(line)
        if reason:
            bad.append((index, reason))
            continue
        fields = line.split(b"\t")
        bases = [10] * 14 + [16] * 26
        good.append(tuple(int(f, base) if f else None for f, base in zip(fields, bases, strict=True)))
    return good, bad


def read(block: bytes) -> tuple[list[tuple[int | None, ...]], list[tuple[int, str]]]:
    """What `read_block` finds in all slices of a block together, in the reference's words."""
    good, bad, num_lines = [], [], 0
    for frame, found in read_block(block):
        assert frame.columns == list(COLUMN_NAMES)
        good += frame.rows()
        bad += [(num_lines + line.index, line.reason) for line in found]
        num_lines += frame.height + len(found)
    return good, bad


@st.composite
def spoiled_blocks(draw):
    lines = []
    for line in draw(st.lists(st.sampled_from(GOOD_LINES), min_size=1, max_size=5)):
        fields = line.split(b"\t")
        for _ in range(draw(st.integers(0, 2))):
            position = draw(st.integers(0, len(fields) - 1))
            fields[position] = draw(st.sampled_from(SPOILERS) | st.binary(max_size=6))
        if draw(st.integers(0, 9)) == 0:
            fields.pop()
        lines.append(b"\t".join(fields) + draw(st.sampled_from([b"\n", b"\n", b"\r\n"])))
    return b"".join(lines)


@pytest.mark.system
@settings(max_examples=400)
@given(spoiled_blocks())
def test_agrees_with_the_grammar(block):
    assert read(block) == reference(block)


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_takes_any_bytes(block):
    assert read(block + b"\n") == reference(block + b"\n")


@pytest.mark.parametrize("position", [0, 5, 30])
def test_every_byte_in_every_place_of_a_field_is_judged_alike(position):
    """All in one block, so that they are vetted; and what is bad is never parsed, alone in a block either."""
    fields = [b"1", *[b"12"] * 13, *[b"ab"] * 26]
    lines = []
    for byte in range(256):
        for before in range(3):
            field = fields[position][:before] + bytes([byte]) + fields[position][before:]
            lines.append(b"\t".join([*fields[:position], field, *fields[position + 1 :]]) + b"\n")
    assert read(b"".join(lines)) == reference(b"".join(lines))
    good = b"".join(line for line in lines if not reference(line)[1])
    assert read(good) == reference(good)
    for line in lines:
        if reference(line)[1]:
            assert _parse(line.replace(b"\r\n", b"\n")) is None, line


def test_a_bad_line_costs_its_block_nothing_else():
    lines = make_lines(1000, seed=1)
    lines[17], lines[400] = lines[17].replace(b"\t", b" ", 1), b""
    ((frame, bad),) = read_block(b"\n".join(lines) + b"\n")
    assert frame.height == 998
    assert [(line.index, line.reason, line.text) for line in bad] == [
        (17, "field_count", lines[17]),
        (400, "field_count", b""),
    ]


@pytest.mark.parametrize("short", [b"", b"x", b"\r"])
def test_very_many_short_lines_come_in_slices(short):
    lines = [short] * 3000
    for index, good in enumerate(GOOD_LINES):
        lines[index * 150] = good
    block = b"".join(line + b"\n" for line in lines)
    slices = [frame.height + len(bad) for frame, bad in read_block(block)]
    assert max(slices) <= len(block) / 160
    assert sum(slices) == len(lines)
    assert read(block) == reference(block)


def test_lines_of_usual_length_come_at_once():
    block = b"\n".join([*GOOD_LINES, b"bad"]) + b"\n"
    assert len(list(read_block(block))) == 1


def test_a_byte_order_mark_spoils_its_line_wherever_it_stands():
    marked = codecs.BOM_UTF8 + GOOD_LINES[0]
    for lines in ([marked, *GOOD_LINES], [*GOOD_LINES, marked], [marked], [marked, b"bad", GOOD_LINES[0]]):
        block = b"\n".join(lines) + b"\n"
        assert read(block) == reference(block)
        assert (lines.index(marked), "label") in read(block)[1]


@pytest.mark.parametrize("excess", [0, 1])
def test_the_longest_line_is_the_same_for_both_ways(excess):
    fields = GOOD_LINES[0].split(b"\t")
    fields[39] = b""
    fields[39] = b"0" * (MAX_LINE_BYTES - len(b"\t".join(fields)) + excess)
    ((frame, bad),) = read_block(b"\t".join(fields) + b"\n")
    assert [line.reason for line in bad] == ["too_long"] * excess
    assert frame.height == 1 - excess


def test_an_empty_block_has_the_columns():
    ((frame, bad),) = read_block(b"")
    assert (frame.height, frame.columns, bad) == (0, list(COLUMN_NAMES), [])
