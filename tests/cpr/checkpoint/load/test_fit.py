"""Wish 6: state of another model is refused with the difference, before anything is written."""

from dataclasses import replace

import pytest
import torch

from cpr.checkpoint.catalog.chain import State, find_states
from cpr.checkpoint.load.shard_loader import check_fit
from cpr.errors import CorruptFileError, MismatchError
from cpr.shards.shard import TableShard
from tests.cpr.checkpoint.saves import MemoryStorage, make_shard, save

PATH = "saves/00000000/manifest.json"


def state_of(*shards: TableShard) -> State:
    storage = MemoryStorage()
    save(storage, 0, shards)
    return find_states(storage)[0][0]


def message(state: State, shard: TableShard) -> str:
    with pytest.raises(MismatchError) as raised:
        check_fit(state, shard)
    return str(raised.value)


def test_a_missing_table_is_named_with_the_saved_ones():
    text = message(state_of(make_shard("a"), make_shard("b")), make_shard("c"))
    assert text.startswith(f"{PATH} has no table c; it has a, b. ")


@pytest.mark.parametrize(
    ("here", "difference"),
    [
        ({"shape": (101, 8)}, f"its size in this model: 101 x 8; in {PATH}: 100 x 8."),
        (
            {"dtype": torch.float16},
            (
                "its columns in this model: sum (float32 per row), weights (float16 per element); "
                f"in {PATH}: sum (float32 per row), weights (float32 per element)."
            ),
        ),
        ({"states": {}}, "its columns in this model: weights (float32 per element); in"),
        ({"states": {"sum": True, "exp_avg": False}}, "exp_avg (float32 per element), sum (float32 per row)"),
        ({"states": {"sum": False}}, "sum (float32 per element), weights (float32 per element); in"),
    ],
    ids=["rows", "dtype", "state too many", "state too few", "state per row"],
)
def test_what_differs_is_named_with_both_values_and_what_to_do(here, difference):
    text = message(state_of(make_shard()), make_shard(**here))
    assert text.startswith("table model.t: ")
    assert difference in text
    assert "Build the model with the tables, data types and optimizer it was saved with" in text


def test_weights_alone_fit_where_optimizer_state_was_saved_but_not_another_dtype():
    state = state_of(make_shard())
    check_fit(state, make_shard(states={}), weights_only=True)
    with pytest.raises(
        MismatchError, match=r"its columns in this model: weights \(float16 per element\); in"
    ):
        check_fit(state, make_shard(states={}, dtype=torch.float16), weights_only=True)
    with pytest.raises(MismatchError, match=r"sum \(float32 per element\)"):
        check_fit(state, make_shard(states={"sum": False}), weights_only=True)


def test_a_base_without_some_rows_of_the_shard_is_refused():
    state = state_of(make_shard(rows=(0, 40)), make_shard(rows=(40, 100), cols=(0, 6)))
    with pytest.raises(
        CorruptFileError, match=r"rows 40 to 69, columns 6 to 7 of table model\.t: .*incomplete"
    ) as raised:
        check_fit(state, make_shard(rows=(30, 70), cols=(4, 8)))
    assert str(raised.value).startswith(f"{PATH} is a base without")
    check_fit(state, make_shard(rows=(30, 70), cols=(4, 6)))


def test_rows_that_lie_in_two_files_of_a_save_are_refused():
    state = state_of(make_shard(rows=(0, 60)), make_shard(rows=(50, 100)))
    with pytest.raises(
        CorruptFileError, match=r"rows 50 to 59, columns 0 to 7 of table model\.t in two files"
    ):
        check_fit(state, make_shard())
    check_fit(state, make_shard(rows=(0, 50)))


def test_a_row_save_of_few_shards_fits():
    storage, left, right = MemoryStorage(), make_shard(cols=(0, 4)), make_shard(cols=(4, 8))
    base = save(storage, 0, [left, right])
    save(storage, 1, [left], base, {left.name: torch.tensor([3])})
    check_fit(find_states(storage)[0][0], make_shard())


def test_a_base_with_a_chunk_left_out_is_refused():
    state = state_of(make_shard())
    entry = state.newest.rows[0]
    holed = replace(entry, chunks=(*entry.chunks[:2], *entry.chunks[3:]))
    with pytest.raises(ValueError, match=r"model\.t/r0-c0\.arrow is of a base and has no chunk with row 32"):
        replace(state.newest, rows=(holed,)).check()
