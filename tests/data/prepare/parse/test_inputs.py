"""Which raw files there are, their days and their pieces."""

import codecs
import gzip
import itertools

import pytest
import zstandard

from data.jobs.location import Location
from data.prepare.parse import inputs
from data.prepare.parse.inputs import find_inputs, plan
from data.text.content import open_content
from data.text.streams import LineReader
from tests.data.prepare.conftest import make_lines


def test_days_follow_from_file_names(raw_file):
    paths = [raw_file(make_lines(2), name) for name in ("day_10", "day_2", "day_0.tsv")]
    assert [
        (raw.path.name, raw.first_day, raw.num_days) for raw in find_inputs([*map(Location.of, paths)], None)
    ] == [
        ("day_0.tsv", 0, 1),
        ("day_2", 2, 1),
        ("day_10", 10, 1),
    ]


def test_other_names_are_days_in_the_order_given(raw_file):
    paths = [raw_file(make_lines(2), name) for name in ("b.txt", "a.txt")]
    assert [(raw.path.name, raw.first_day) for raw in find_inputs([*map(Location.of, paths)], None)] == [
        ("b.txt", 0),
        ("a.txt", 1),
    ]


def test_a_single_file_is_cut_into_days_and_pieces_that_cover_it(raw_file, monkeypatch):
    monkeypatch.setattr(inputs, "PIECE_BYTES", 3000)
    (raw,) = find_inputs([Location.of(raw_file(make_lines(300)))], 4)
    spans = plan(raw)
    assert [(span.start, span.end) for span in spans[1:]] == [
        (before.end, after.end) for before, after in itertools.pairwise(spans)
    ]
    assert (spans[0].start, spans[-1].end) == (0, raw.num_bytes)
    assert max(span.end - span.start for span in spans) <= 3000
    assert {span.day for span in spans} == {0, 1, 2, 3}
    for day in range(4):
        assert [span.index for span in spans if span.day == day] == list(range(len(spans) // 4))


@pytest.mark.parametrize(
    ("names", "days", "match"),
    [
        (("day_1", "train.txt"), None, "some files are named day_N"),
        (("day_1", "day_1.tsv"), None, "same day"),
        (("day_1",), 3, "--days"),
        (("a", "b"), 3, "--days"),
    ],
)
def test_days_that_do_not_add_up(raw_file, names, days, match):
    with pytest.raises(ValueError, match=match):
        find_inputs([Location.of(raw_file(make_lines(2), name)) for name in names], days)


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_more_days_than_lines_are_refused(tmp_path, name):
    path, text = tmp_path / name, b"\n".join(make_lines(3))
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    find_inputs([Location.of(path)], 3)
    with pytest.raises(ValueError, match=r"--days 4: .*train.* has only 3 lines; give fewer days"):
        find_inputs([Location.of(path)], 4)


def test_files_that_are_not_there_empty_or_given_twice(tmp_path, raw_file):
    with pytest.raises(ValueError, match=r"nothing\.txt is not a file"):
        find_inputs([Location.of(tmp_path / "nothing.txt")], None)
    with pytest.raises(ValueError, match="is empty"):
        find_inputs([Location.of(raw_file([]))], None)
    path = raw_file(make_lines(2))
    with pytest.raises(ValueError, match="more than once"):
        find_inputs([Location.of(path)] * 2, None)


def test_compression_is_detected_by_the_first_bytes(tmp_path, raw_file):
    text = b"\n".join(make_lines(20)) + b"\n"
    packed = {"train.txt": gzip.compress(text), "day.tsv": zstandard.compress(text), "plain.gz": text}
    for name, stored in packed.items():
        (tmp_path / name).write_bytes(stored)
    found = find_inputs([Location.of(tmp_path / name) for name in packed], None)
    assert [raw.compressed for raw in found] == [True, True, False]
    for raw in found:
        content = open_content(raw.path, [0])
        assert b"".join(LineReader(content, 0, 1000).blocks(lambda: None)) == text
        content.close()


def test_a_byte_order_mark_is_no_part_of_another_format(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes(codecs.BOM_UTF8 + make_lines(1)[0] + b"\n")
    (raw,) = find_inputs([Location.of(path)], None)
    assert raw.num_days == inputs.DEFAULT_DAYS


def test_kaggles_test_file_is_recognised(raw_file):
    unlabelled = [line.partition(b"\t")[2] for line in make_lines(20)]
    with pytest.raises(ValueError, match=r"39 fields.*test\.txt"):
        find_inputs([Location.of(raw_file(unlabelled, "test.txt"))], None)


def test_another_format_and_an_empty_archive_are_refused(tmp_path, raw_file):
    with pytest.raises(ValueError, match="not in Criteo's format"):
        find_inputs([Location.of(raw_file([b"a,b,c"] * 5))], None)
    fake = tmp_path / "day_0.gz"
    fake.write_bytes(b"\x1f\x8b\x08 but no more of gzip")
    with pytest.raises(ValueError, match="cannot be decompressed"):
        find_inputs([Location.of(fake)], None)
    hollow = tmp_path / "day_1.gz"
    hollow.write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match="not in Criteo's format"):
        find_inputs([Location.of(hollow)], None)
