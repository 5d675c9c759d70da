"""Whole lines from plain and compressed files: every line exactly once, wherever the cuts fall."""

import codecs
import gzip
import itertools
import random

import hypothesis.strategies as st
import pytest
import zstandard
from hypothesis import HealthCheck, assume, example, given, settings

from data.jobs.location import Location
from data.prepare.parse.lines import judge_line
from data.text import content as content_module
from data.text.content import codec_of, open_content
from data.text.streams import MAX_LINE_BYTES, LineReader

MAGICS = [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", *(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16))]


def read_range(path, start, end, block_bytes):
    """The lines that start in a range, as the convert task reads them."""
    content = open_content(Location.of(path), [0])
    early = max(start - 1, 0)
    content.skip_to(early)
    reader = LineReader(content, early, block_bytes)
    if start:
        reader.skip_partial_line()
    text = b"".join(reader.blocks(lambda: end))
    content.close()
    return text


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_ranges_share_out_the_lines(tmp_path, lines, final_newline, block_bytes, num_ranges):
    text = b"\n".join(lines) + (b"\n" if final_newline else b"")
    path = tmp_path / "raw"
    path.write_bytes(text)
    assume(codec_of(Location.of(path)) is None and not text.startswith(codecs.BOM_UTF8))
    cuts = [len(text) * index // num_ranges for index in range(num_ranges + 1)]
    parts = [read_range(path, *pair, block_bytes) for pair in itertools.pairwise(cuts)]
    assert b"".join(parts) == (text if text.endswith(b"\n") or not text else text + b"\n")


@pytest.mark.parametrize("kind", ["gz", "gz-members", "gz-padded", "zst", "zst-frames"])
def test_compressed_text_is_the_plain_text(tmp_path, kind):
    text = b"".join(b"%d\n" % index for index in range(60_000))
    half = len(text) // 2
    packed = {
        "gz": gzip.compress(text),
        "gz-members": gzip.compress(text[:half]) + gzip.compress(b"") + gzip.compress(text[half:]),
        "gz-padded": gzip.compress(text) + bytes(1000),
        "zst": zstandard.compress(text),
        "zst-frames": zstandard.compress(text[:half]) + zstandard.compress(text[half:]),
    }[kind]
    path = tmp_path / f"raw.{kind.partition('-')[0]}"
    path.write_bytes(packed)
    content = open_content(Location.of(path), [0])
    assert b"".join(LineReader(content, 0, 1000).blocks(lambda: None)) == text
    assert content.damage is None
    assert content.stored_position == len(packed)
    content.close()


def test_days_of_a_compressed_file_start_where_its_stored_bytes_say(tmp_path):
    members = [b"".join(b"%d %d\n" % (day, index) for index in range(5000)) for day in range(3)]
    packed = [gzip.compress(member) for member in members]
    path = tmp_path / "raw.gz"
    path.write_bytes(b"".join(packed))
    content = open_content(Location.of(path), [0, len(packed[0]), len(packed[0]) + len(packed[1])])
    reader = LineReader(content, 0, 7000)
    for day, member in enumerate(members):
        start = reader.offset
        assert reader.day == day
        assert b"".join(reader.blocks(lambda start=start: reader.day_end(start))) == member
    assert reader.exhausted
    content.close()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("spoil", ["cut", "flip"])
def test_damaged_file_keeps_whole_lines_and_reports_damage(tmp_path, suffix, spoil):
    text = b"".join(b"line %d\n" % (index * 7919) for index in range(50_000))
    packed = (
        gzip.compress(text)
        if suffix == "gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress(text)
    )
    middle = len(packed) * 2 // 3
    spoiled = packed[:middle] if spoil == "cut" else packed[:middle] + bytes(64) + packed[middle + 64 :]
    path = tmp_path / f"raw.{suffix}"
    path.write_bytes(spoiled)
    content = open_content(Location.of(path), [0])
    reader = LineReader(content, 0, 5000)
    lines = b"".join(reader.blocks(lambda: None))
    assert content.damage
    if spoil == "cut":
        assert text.startswith(lines + reader.partial)
        assert not lines or lines.endswith(b"\n")
        assert len(lines) < len(text)
    content.close()


PACK = {"gz": gzip.compress, "zst": zstandard.compress}


def read_all(path, block_bytes=1000):
    content = open_content(Location.of(path), [0])
    reader = LineReader(content, 0, block_bytes)
    text = b"".join(reader.blocks(lambda: None))
    content.close()
    return text, reader


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["gz", "zst"]),
    num_lines=st.integers(0, 20_000),
    trailing=st.binary(min_size=1, max_size=100),
    read_bytes=st.integers(1, 200),
)
@example(kind="gz", num_lines=9, trailing=b"\x1f no gzip", read_bytes=1)
@example(kind="zst", num_lines=9, trailing=b"\x28\xb5\x2f no zstd", read_bytes=1)
def test_bytes_after_the_compressed_data_take_no_line_away(tmp_path, kind, num_lines, trailing, read_bytes):
    assume(
        trailing[0] and not any(trailing.startswith(magic) or magic.startswith(trailing) for magic in MAGICS)
    )
    text = b"".join(b"%d\n" % (index * 7919) for index in range(num_lines)) + b"last"
    path = tmp_path / "raw"
    path.write_bytes(PACK[kind](text) + trailing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_module, "_READ_BYTES", read_bytes)
        lines, reader = read_all(path)
    assert lines == text + b"\n"
    assert (reader.content.trailing, reader.content.damage) == (trailing, None)
    assert reader.content.stored_position == path.stat().st_size


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize(
    "spoil", ["cut in the head", "cut", "damaged", "overwritten", "checksum cut"], ids=lambda spoil: spoil
)
def test_a_broken_second_member_keeps_all_lines_of_the_first(tmp_path, kind, spoil):
    first, second = (b"".join(b"%d\n" % index for index in range(start, start + 5000)) for start in (0, 5000))
    if spoil == "overwritten":
        second = random.Random(0).randbytes(200_000)  # does not shrink below what may follow a file's end
    packed = PACK[kind](second)
    packed = {
        "cut in the head": packed[:1],
        "cut": packed[: len(packed) // 2],
        "damaged": packed[:12] + b"\xff" * 100 + packed[112:],
        "overwritten": b"\xff" * 8 + packed[8:],
        "checksum cut": packed[:-3],
    }[spoil]
    path = tmp_path / "raw"
    path.write_bytes(PACK[kind](first) + packed)
    lines, reader = read_all(path)
    assert lines.startswith(first)
    assert (first + second).startswith(lines)
    assert reader.content.damage
    assert reader.content.trailing == b""


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 20])
def test_a_byte_order_mark_is_taken_off_the_first_line_and_no_other(tmp_path, pack, cut):
    path = tmp_path / "raw"
    path.write_bytes(pack(codecs.BOM_UTF8 + b"first\n" + codecs.BOM_UTF8 + b"second\n"))
    expected = b"first\n" + codecs.BOM_UTF8 + b"second\n"
    assert read_all(path)[0] == expected
    assert read_all(path, block_bytes=2)[0] == expected
    if pack is bytes:
        assert read_range(path, 0, cut, 5) + read_range(path, cut, 99, 5) == expected


@pytest.mark.parametrize("final_newline", [True, False])
def test_a_line_without_end_is_one_bad_line_and_takes_no_memory(tmp_path, final_newline):
    path = tmp_path / "raw"
    long_line = b"7" * (5 * MAX_LINE_BYTES)
    path.write_bytes(b"a\n" + long_line + (b"\nb\n" if final_newline else b""))
    content = open_content(Location.of(path), [0])
    blocks = list(LineReader(content, 0, 10_000).blocks(lambda: None))
    content.close()
    assert max(map(len, blocks)) < 1.1 * MAX_LINE_BYTES
    lines = b"".join(blocks).split(b"\n")
    assert (lines[0], lines[2:]) == (b"a", [b"b", b""] if final_newline else [b""])
    assert judge_line(lines[1]) == "too_long"
