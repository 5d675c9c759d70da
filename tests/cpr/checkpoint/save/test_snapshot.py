"""Snapshots copy rows with their optimizer state, in pieces, each from one moment."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.checkpoint.save import snapshot
from cpr.checkpoint.save.snapshot import RowSelection, Snapshot, select_rows
from cpr.checkpoint.save.staging import PIECE_BYTES
from tests.cpr.checkpoint import saves


def make_shard(**fields):
    """Rows 1000 to 1099; each holds its number in the shard."""
    shard = saves.make_shard("model.table", shape=(5000, 4), rows=(1000, 1100), **fields)
    shard.optimizer_state["sum"].copy_(torch.arange(100))
    shard.weights.copy_(torch.arange(100)[:, None])
    return shard


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
    shard = make_shard(flush=lambda: flushed.append(True))
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
