"""What rounding leaves of a weight makes it exact again, and every rounded row has its turn."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.mirror.pieces import ShardRows, read_pieces, write_piece
from cpr.mirror.rounding import REST, Form, RoundedRows, decode, encode

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6)
FINITE = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=6, max_size=6)


def weights_of(values, dtype):
    return np.array(values, dtype).view(np.float32).reshape(2, 3)


@given(BITS)
def test_all_bits_of_a_weight_come_back_however_often_the_rest_is_written(bits):
    weights = weights_of(bits, np.uint32)
    held = decode(Form.BF16, encode(Form.BF16, weights), np.zeros_like(weights))
    for _ in range(2):
        held = decode(Form.BF16_REST, encode(Form.BF16_REST, weights), held)
        assert held.tobytes() == weights.tobytes()


@given(FINITE)
def test_rounded_weights_are_close(values):
    weights = weights_of(values, np.float32)
    largest = np.abs(weights).max(1, keepdims=True)
    for form, error in ((Form.BF16, np.abs(weights) / 256), (Form.INT8, largest / 127 * 0.5001)):
        found = decode(form, encode(form, weights), np.zeros_like(weights))
        assert (np.abs(found - weights) <= error + 1e-37).all()


@given(form=st.sampled_from(sorted(REST)), rows=st.sets(st.integers(0, 8)), cols=st.integers(1, 5))
def test_a_row_that_travels_in_two_parts_arrives_as_it_is(form, rows, cols):
    live = {"sum": torch.rand(9), "weights": torch.randn(9, cols), "age": torch.arange(9)}
    held = {name: torch.zeros_like(column) for name, column in live.items()}
    owner, keeper = ShardRows(live), ShardRows(held)
    chosen = torch.tensor(sorted(rows), dtype=torch.int64)
    for each in (form, REST[form]):
        num_bytes = owner.piece_bytes(len(rows), listed=True, form=each)
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        assert write_piece(buffer, 0, owner, chosen, each) == num_bytes
        for piece in read_pieces(buffer, [keeper]):
            keeper.write(keeper.exact(piece))
        for name in ("sum", "age"):
            assert torch.equal(held[name][chosen], live[name][chosen])
    assert torch.equal(held["weights"][chosen], live["weights"][chosen])
    num_exact = owner.piece_bytes(0, listed=True) + len(rows) * (8 + 4 + 8 + 4 * cols)
    assert owner.piece_bytes(len(rows), listed=True, form=form) < num_exact + 32 + 8 * len(rows)


ROWS = st.dictionaries(st.sampled_from([1, 4]), st.sets(st.integers(0, 6), min_size=1))


@given(st.lists(st.one_of(st.tuples(st.booleans(), ROWS), st.integers(1, 5)), max_size=12))
def test_rounded_rows_are_taken_once_each(steps):
    """A step adds rows (True), discards rows, or takes some."""
    tracked, known = RoundedRows({1: 7, 4: 7}), set()

    def take(limit):
        taken = {(shard, row) for shard, rows in tracked.take(limit).items() for row in rows.tolist()}
        assert taken <= known
        assert len(taken) == min(limit, len(known))
        known.difference_update(taken)

    for step in steps:
        if isinstance(step, int):
            take(step)
        else:
            is_added, rows = step
            named = {(shard, row) for shard, of_shard in rows.items() for row in of_shard}
            tensors = {shard: torch.tensor(sorted(each)) for shard, each in rows.items()}
            (tracked.add if is_added else tracked.discard)(tensors)
            known = known | named if is_added else known - named
        assert tracked.count == len(known)
    for _ in range(5):
        take(3)
    assert not known
