"""Pieces of a span: what a stream is cut into, and where an interrupted one goes on."""

import gzip
import io
import itertools
import json

import pytest

from data.jobs.location import Location
from data.prepare.parse import walk
from data.prepare.parse.inputs import find_inputs, plan
from data.prepare.parse.walk import read_pieces
from data.prepare.pieces import Written
from tests.data.prepare.conftest import make_lines

LINES = make_lines(400, seed=5)


@pytest.fixture
def stream(tmp_path, monkeypatch):
    monkeypatch.setattr(walk, "PIECE_BYTES", 10_000)
    path = tmp_path / "train.txt.gz"
    half = len(LINES) // 2
    members = [b"\n".join(lines) + b"\n" for lines in (LINES[:half], LINES[half:])]
    path.write_bytes(b"".join(map(gzip.compress, members)))
    (raw,) = find_inputs([Location.of(path)], 2)
    (span,) = plan(raw)
    return span


def walk_through(span, finished=(), block_bytes=4000):
    records, labels = [], []
    for piece in read_pieces(span, finished, block_bytes, lambda progress: None):
        for frame in piece.frames(io.BytesIO()):
            labels += frame["label"].to_list()
        records.append(piece.record(Written()))
    return records, labels


def test_a_stream_is_cut_at_days_and_at_the_piece_size(stream):
    records, labels = walk_through(stream)
    assert labels == [int(line[:1]) for line in LINES]
    assert [record.last for record in records] == [False] * (len(records) - 1) + [True]
    assert {record.day for record in records} == {0, 1}
    for day in (0, 1):
        assert [record.index for record in records if record.day == day] == list(
            range(sum(record.day == day for record in records))
        )
    assert all(after.start == before.end for before, after in itertools.pairwise(records))
    assert sum(record.num_lines for record in records) == len(LINES)


def test_the_cuts_do_not_depend_on_the_block_size(stream):
    assert walk_through(stream, block_bytes=777) == walk_through(stream, block_bytes=100_000)


def test_interrupted_stream_continues_after_its_finished_pieces(stream):
    records, labels = walk_through(stream)
    for num_finished in range(len(records) + 1):
        rest, rest_labels = walk_through(stream, records[:num_finished])
        assert rest == records[num_finished:]
        assert rest_labels == labels[len(labels) - len(rest_labels) :]


def read_rejects(tmp_path, lines, line_end):
    """Rejects and record of the only piece of a file, and its number of good lines."""
    path = tmp_path / "day_0"
    path.write_bytes(line_end.join(lines))
    (raw,) = find_inputs([Location.of(path)], None)
    (span,) = plan(raw)
    rejects = io.BytesIO()
    for piece in read_pieces(span, (), 5000, lambda progress: None):
        num_good = sum(frame.height for frame in piece.frames(rejects))
    return [json.loads(line) for line in rejects.getvalue().splitlines()], piece.record(Written()), num_good


def test_bad_lines_are_kept_with_line_and_reason(tmp_path):
    lines = list(LINES)
    lines[3] = b"\xff\xfe" + lines[3]
    lines[9] = lines[9].replace(b"\t", b"\tx", 1)
    rejects, record, num_good = read_rejects(tmp_path, lines, b"\r\n")
    assert num_good == len(lines) - 2
    assert [(reject["file"], reject["line"], reject["reason"]) for reject in rejects] == [
        ("day_0", 4, "broken_utf8"),
        ("day_0", 10, "number"),
    ]
    assert rejects[1]["text"].encode() == lines[9]
    assert record.num_rejects == {"broken_utf8": 1, "number": 1}


def test_lines_are_numbered_across_slices(tmp_path):
    rejects, record, num_good = read_rejects(tmp_path, [*LINES, *[b""] * 500, LINES[0], b"x"], b"\n")
    assert num_good == 401
    assert [reject["line"] for reject in rejects] == [*range(401, 901), 902]
    assert record.num_lines == 902
