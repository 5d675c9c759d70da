"""Increments: what they read, what they compare, and which pairs of states they are made of.

`tests/dlrm/sharding/dynamic/test_increments.py` plays whole histories.
"""

import json

import pyarrow.parquet as pq
import pytest
import torch

from cpr.checkpoint.format.manifest import save_folder
from cpr.checkpoint.interop import full_model
from cpr.checkpoint.interop.export import export
from cpr.errors import CorruptFileError, NoUsableStateError
from tests.cpr.checkpoint.saves import MemoryStorage, make_shard, randomise, save

ROWS = 100
FQN = "model.t"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Ten rows of 36 bytes each."""
    monkeypatch.setattr(full_model, "WINDOW_BYTES", 360)


class Chain:
    """A table, and its saves."""

    def __init__(self, shard):
        self.storage, self.saves, self.shard = MemoryStorage(), [], shard
        self.save()

    def save(self, *rows, parent=None, **fields):
        """Change rows, and save them on the newest save; without any, save all rows as they are."""
        for row in rows:
            self.shard.weights[row] += 1
        ids = {self.shard.name: torch.tensor(rows, dtype=torch.int64)} if rows else None
        parent = (parent or self.saves[-1]) if rows else None
        number = len(self.saves)
        self.saves.append(save(self.storage, number, [self.shard], parent, ids, state={}, **fields))
        return self.saves[-1]

    def increment(self, out, since, **options):
        done = export(self.storage, "parquet", out, since=since, **options)
        return done, json.loads((out / "cpr-increment.json").read_text())


@pytest.fixture
def chain():
    shard = make_shard(FQN, (ROWS, 8))
    randomise(shard, torch.Generator().manual_seed(1))
    return Chain(shard)


def rows_in(out):
    return pq.read_table(out / "rows" / FQN)["row"].to_pylist()


def test_rows_are_written_once_with_their_newest_values(chain, tmp_path):
    chain.save(5, 50)
    chain.save(5, 71)
    done, manifest = chain.increment(tmp_path / "out", 0)
    table = pq.read_table(tmp_path / "out/rows" / FQN)
    assert table["row"].to_pylist() == [5, 50, 71]
    assert table["weights"].to_pylist() == chain.shard.weights[[5, 50, 71]].tolist()
    assert table.column_names == ["row", "weights", "sum"]
    assert not (tmp_path / "out/tombstones").exists()
    assert manifest == {
        "format": "cpr-increment",
        "version": 1,
        "run_id": "run-a",
        "since": {"step": 0, "sequences": [0]},
        "to": {"step": 20, "sequence": 2, "created": "2026-01-01T00:00:00+00:00"},
        "tables": {FQN: {"key": "row", "rows": 3, "tombstones": 0}},
    }
    assert done.increment[FQN].rows == 3


def test_windows_that_no_row_save_holds_are_not_read(chain, tmp_path):
    """Beyond row 50, nothing is read of the base."""
    chain.save(5)
    chain.save(41, 47)
    chain.storage.reads.clear()
    totals, seen = [], []
    chain.increment(tmp_path / "out", 0, progress=seen.append, start=totals.append)
    base = {(path, at) for path, at, _ in chain.storage.reads if path.startswith(save_folder(0))}
    offsets = [chunk.offset for chunk in chain.saves[0].rows[0].chunks if chunk.first_row < 50]
    assert {at for path, at in base if path.endswith("r0-c0.arrow")} <= set(offsets)
    assert len(offsets) < len(chain.saves[0].rows[0].chunks)
    assert sum(seen) == totals[0] == ROWS * 36


def test_all_rows_are_compared_where_a_full_save_lies_between(chain, tmp_path):
    """Its rows may have changed in between without a row save that holds them."""
    chain.shard.weights[13] = 7.5
    chain.shard.optimizer_state["sum"][99] += 1
    chain.save()
    chain.increment(tmp_path / "out", 0)
    assert rows_in(tmp_path / "out") == [13, 99]


def test_rows_are_compared_bit_for_bit(chain, tmp_path):
    chain.shard.weights[0], chain.shard.weights[1] = torch.nan, 0.0
    chain.save()
    chain.shard.weights[1] = -0.0
    chain.save()
    chain.increment(tmp_path / "out", 10)
    assert rows_in(tmp_path / "out") == [1]


def test_nothing_has_changed_since_the_newest_state(chain, tmp_path):
    chain.save(5)
    _, manifest = chain.increment(tmp_path / "out", 10)
    assert manifest["since"]["step"] == manifest["to"]["step"] == 10
    assert rows_in(tmp_path / "out") == []


def test_one_increment_serves_all_states_of_its_step(chain, tmp_path):
    """As a row save, and a full one at the end of the run: a follower may have either."""
    chain.save(5, step=10)
    chain.shard.weights[60] += 1
    chain.save(step=10)
    chain.save(7, step=20)
    _, manifest = chain.increment(tmp_path / "out", 10)
    assert manifest["since"] == {"step": 10, "sequences": [1, 2]}
    assert rows_in(tmp_path / "out") == [7, 60]


def test_row_saves_behind_compactions_count(chain, tmp_path):
    """Two of them: of each row save since, in whichever base it was merged, other windows are read."""
    chain.save(5)
    chain.save(15)
    chain.save(merged=(0, 1, 2), moment="rolling", step=20)
    chain.save(35)
    chain.save(merged=(3, 4), moment="rolling", step=40)
    chain.save(75)
    chain.storage.reads.clear()
    _, manifest = chain.increment(tmp_path / "out", 10)
    assert (manifest["since"]["sequences"], manifest["to"]["sequence"]) == ([1], 6)
    assert rows_in(tmp_path / "out") == [15, 35, 75]
    last = chain.saves[0].rows[0].chunks[-1]
    assert last.offset not in {at for path, at, _ in chain.storage.reads if path.startswith(save_folder(0))}


def test_a_merged_base_is_the_newest_save_that_it_was_made_from(chain, tmp_path):
    chain.save(5)
    chain.save(merged=(0, 1), moment="rolling", step=10)
    chain.save(6)
    _, manifest = chain.increment(tmp_path / "out", 10)
    assert manifest["since"] == {"step": 10, "sequences": [1, 2]}
    assert rows_in(tmp_path / "out") == [6]


@pytest.fixture
def dynamic():
    """A dynamic table of four rows, of which two were saved with the same id: the first is the newer one."""
    shard = make_shard(FQN, (4, 2), states={})
    shard.weights.copy_(torch.arange(8.0).view(4, 2))
    shard.optimizer_state.update(
        id=torch.tensor([70, 70, 80, 90]),
        last_seen=torch.tensor([9, 5, 9, 0], dtype=torch.int32),
        candidate=torch.zeros(4, dtype=torch.int64),
        sightings=torch.zeros(4, dtype=torch.int32),
    )
    return Chain(shard)


def change(chain, row, **columns):
    for name, value in columns.items():
        chain.shard.columns[name][row] = value
    chain.save()


def in_increment(out):
    rows = {row["id"]: row["weights"] for row in pq.read_table(out / "rows" / FQN).to_pylist()}
    return rows, pq.read_table(out / "tombstones" / FQN)["id"].to_pylist()


def test_an_id_of_two_rows_is_that_of_the_one_seen_last(dynamic, tmp_path):
    """When it has lost that row, the values of the other one count, which has not changed."""
    change(dynamic, 0, id=60, last_seen=12)
    dynamic.increment(tmp_path / "out", 0)
    assert in_increment(tmp_path / "out") == ({60: [0, 1], 70: [2, 3]}, [])


def test_a_row_without_id_is_a_tombstone_once(dynamic, tmp_path):
    change(dynamic, 2, last_seen=0)
    dynamic.increment(tmp_path / "out", 0)
    assert in_increment(tmp_path / "out") == ({}, [80])
    change(dynamic, 2, weights=1.5)
    dynamic.increment(tmp_path / "again", 10)
    assert in_increment(tmp_path / "again") == ({}, [])


def test_counts_of_waiting_ids_change_no_row(dynamic, tmp_path):
    change(dynamic, 2, candidate=3, sightings=1)
    dynamic.increment(tmp_path / "out", 0)
    assert in_increment(tmp_path / "out") == ({}, [])
    columns = pq.read_schema(tmp_path / "out/rows" / FQN / "part-00000.parquet").names
    assert columns == ["id", "weights", "last_seen"]


def test_states_of_another_branch_are_compared(chain, tmp_path):
    """Training went back to an older save after the follower had exported a newer one."""
    chain.save(5)
    chain.save(6)
    abandoned = chain.shard.weights.clone()
    chain.shard.weights[6] -= 1
    chain.save(8, parent=chain.saves[1], step=15)
    _, manifest = chain.increment(tmp_path / "out", 20)
    assert (manifest["since"]["sequences"], manifest["to"]["sequence"]) == ([2], 3)
    assert rows_in(tmp_path / "out") == [6, 8]
    found = pq.read_table(tmp_path / "out/rows" / FQN)["weights"].to_pylist()
    abandoned[[6, 8]] = torch.tensor(found)
    assert torch.equal(abandoned, chain.shard.weights)


def test_an_older_target_can_be_asked_for(chain, tmp_path):
    for row in (5, 6, 7):
        chain.save(row)
    done, _ = chain.increment(tmp_path / "step", 10, step=20)
    assert (done.state.sequence, rows_in(tmp_path / "step")) == (2, [6])
    done, _ = chain.increment(tmp_path / "sequence", 0, sequence=2)
    assert (done.state.sequence, rows_in(tmp_path / "sequence")) == (2, [5, 6])
    with pytest.raises(ValueError, match="save 1 of memory, at step 10, is older than save 2 at step 20"):
        chain.increment(tmp_path / "no", 20, sequence=1)


def damage(chain, sequence):
    entry = chain.saves[sequence].rows[0]
    path = f"{save_folder(sequence)}/{entry.path}"
    chain.storage.flip_bit(path, entry.chunks[0].offset + entry.chunks[0].length - 1)
    return path


def test_a_damaged_target_leads_to_the_state_before_it(chain, tmp_path):
    for row in (5, 6):
        chain.save(row)
    path = damage(chain, 2)
    done, _ = chain.increment(tmp_path / "out", 0)
    assert (done.state.sequence, rows_in(tmp_path / "out")) == (1, [5])
    assert path in done.rejected[0].reason
    with pytest.raises(CorruptFileError, match=path):
        chain.increment(tmp_path / "asked", 0, sequence=2)


def test_a_damaged_start_is_named_with_what_to_do(chain, tmp_path):
    chain.save(5)
    chain.save()
    path = damage(chain, 1)
    with pytest.raises(NoUsableStateError, match=rf"since step 10: make a full export[^\n]*\n.*{path}"):
        chain.increment(tmp_path / "out", 10)
    assert list(tmp_path.iterdir()) == []


def test_changed_tables_are_refused_by_name(chain, tmp_path):
    chain.shard = make_shard(FQN, (ROWS + 1, 8))
    chain.save()
    with pytest.raises(ValueError, match=rf"{FQN} changed .* between steps 0 and 10.* make a full export"):
        chain.increment(tmp_path / "out", 0)


def test_an_empty_directory_has_no_increment(tmp_path):
    with pytest.raises(NoUsableStateError, match="name a directory in which a run has saved"):
        export(MemoryStorage(), "parquet", tmp_path / "out", since=0)
