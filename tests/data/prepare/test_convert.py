"""One piece to Parquet: row groups and bytes do not depend on the blocks it was read in."""

import hashlib

import pyarrow.parquet as pq
import pytest

from data.jobs.location import Location
from data.prepare import convert
from data.prepare.convert import ConvertSpan
from data.prepare.parse.columns import read_block
from data.prepare.parse.ids import modulo_ids
from data.prepare.parse.inputs import find_inputs, plan
from data.prepare.pieces import read_records
from tests.data.prepare.conftest import make_lines


@pytest.fixture
def run(raw_file, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ROW_GROUP_ROWS", 300)
    lines = make_lines(1000, seed=11)
    lines[700] = b"bad"
    (raw,) = find_inputs([Location.of(raw_file(lines, "day_0"))], None)
    (span,) = plan(raw)

    def run(block_bytes):
        out = tmp_path / str(block_bytes)
        task = ConvertSpan(
            span=span,
            finished=(),
            out=Location.of(out),
            records=Location.of(out / "records"),
            rule=modulo_ids((1000,) * 26),
            block_bytes=block_bytes,
        )
        task.run(lambda progress: None)
        (record,) = read_records(Location.of(out / "records")).values()
        return record, out / f"{record.name}.parquet"

    return run


def test_the_record_is_of_the_file(run):
    record, path = run(20_000)
    assert record.row_groups == (300, 300, 300, 99)
    metadata = pq.read_metadata(path)
    assert tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) == record.row_groups
    assert record.num_bytes == path.stat().st_size
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_blocks_of_any_size_give_the_same_bytes(run):
    records = [run(block_bytes)[0] for block_bytes in (5_000, 33_333, 10_000_000)]
    assert len({record.sha256 for record in records}) == 1
    assert records[0] == records[1] == records[2]


def test_piece_without_good_lines_has_no_file(run, monkeypatch):
    monkeypatch.setattr("data.prepare.parse.walk.read_block", lambda block: read_block(b""))
    record, path = run(5_000)
    assert (record.row_groups, record.num_bytes) == ((), 0)
    assert not path.exists()
