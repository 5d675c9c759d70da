"""Snapshots copy rows with their optimizer state, in pieces, each from one moment."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.checkpoint.save import snapshot
from cpr.checkpoint.save.snapshot import RowSelection, Snapshot, select_rows
from cpr.checkpoint.save.staging import PIECE_BYTES
from cpr.shards.shard import TableShard


def make_shard(rows=100, cols=4, row_offset=1000):
    values = torch.arange(rows, dtype=torch.float32)
    return TableShard(
        table_fqn="model.table",
        table_shape=(5000, cols),
        row_offset=row_offset,
        col_offset=0,
        replicated=False,
        weights=values.unsqueeze(1).repeat(1, cols).clone(),
        optimizer_state={"sum": values.clone()},
    )


def pieces_of(snap, step=0):
    while not snap.done:
        yield snap.copy_next(torch.empty(PIECE_BYTES, dtype=torch.uint8), step)


@pytest.fixture
def small_pieces(monkeypatch):
    """Seven rows a piece, so that few rows make many pieces."""
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 7)


def test_all_rows_come_once_and_in_order(small_pieces):
    shard = make_shard()
    pieces = list(pieces_of(Snapshot([RowSelection(shard, None)])))
    assert len(pieces) == 15
    assert [piece.rows.first_row for piece in pieces] == list(range(1000, 1100, 7))
    for column in ("weights", "sum"):
        assert torch.equal(torch.cat([piece.rows.columns[column] for piece in pieces]), shard.columns[column])


@given(asked=st.lists(st.integers(1000, 1099)))
def test_chosen_rows_come_sorted_and_once(asked):
    shard = make_shard()
    snap = Snapshot(select_rows([shard], {shard.name: torch.tensor(asked, dtype=torch.int64)}))
    pieces = list(pieces_of(snap))
    ids = [row for piece in pieces for row in piece.rows.ids.tolist()]
    assert ids == sorted(set(asked))
    for piece in pieces:
        assert torch.equal(piece.rows.columns["weights"][:, 0], (piece.rows.ids - 1000).float())
        assert torch.equal(piece.rows.columns["sum"], (piece.rows.ids - 1000).float())


def test_a_row_and_its_state_are_of_one_moment_while_training_continues(small_pieces):
    shard = make_shard()
    snap, step = Snapshot([RowSelection(shard, None)]), 0
    while not snap.done:
        piece = snap.copy_next(torch.empty(PIECE_BYTES, dtype=torch.uint8), step)
        assert torch.equal(piece.rows.columns["weights"][:, 0], piece.rows.columns["sum"])
        assert piece.step == step
        shard.weights.add_(1)
        shard.optimizer_state["sum"].add_(1)
        step += 1
    assert step == 15


def test_device_caches_are_flushed_before_reading_once_a_step(small_pieces):
    flushed = []
    plain = make_shard()
    shard = TableShard(**{**plain.__dict__, "flush": lambda: flushed.append(True)})
    snap = Snapshot([RowSelection(shard, None)])
    for step in (0, 0, 1, 1):
        snap.copy_next(torch.empty(PIECE_BYTES, dtype=torch.uint8), step)
    assert len(flushed) == 2


def test_nothing_selected_is_done_at_once():
    shard = make_shard()
    assert Snapshot([]).done
    assert Snapshot(select_rows([shard], {shard.name: torch.empty(0, dtype=torch.int32)})).done


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"model.table/r0-c0": torch.tensor([1])}, "has no shard 'model.table/r0-c0'"),
        ({"model.table/r1000-c0": torch.tensor([999])}, "which holds rows 1000 to 1099"),
        ({"model.table/r1000-c0": torch.tensor([1100])}, "which holds rows 1000 to 1099"),
    ],
)
def test_rows_of_other_shards_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        select_rows([make_shard()], rows)
