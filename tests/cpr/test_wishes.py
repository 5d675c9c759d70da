"""Wishes 2, 3 and 7 of `requirements-from-users.md`, as a user of the library sees them.

The others are tested with the parts that fulfil them: chains, damage, resharding over real ranks, kills.
"""

import pytest
import torch

from cpr.checkpoint.config import WRITER_BYTES
from cpr.checkpoint.save import snapshot
from cpr.checkpoint.save.staging import PIECE_BYTES
from tests.cpr.checkpoint.runs import assert_same


def test_wish_2_another_plan_loads_the_same_values(start):
    run = start(layout={"a": "tw", "b": "cw"})
    run.train(3)
    run.checkpointer.save("consistent")
    run.checkpointer.close()
    tables = whole_tables(run)
    again = start(layout={"a": "cw", "b": "tw"})
    again.checkpointer.load()
    assert_same(whole_tables(again), tables)


def whole_tables(run):
    """The weights of whole tables, by name."""
    tables = {}
    for shard in run.checkpointer.shards:
        whole = tables.setdefault(shard.table_fqn, torch.full(shard.table_shape, torch.nan))
        whole[:, shard.col_offset : shard.col_offset + shard.num_cols] = shard.weights
    return tables


def test_wish_3_optimizer_rows_learning_rate_and_counters_are_of_the_same_moment(start):
    run = start()
    run.train(3)
    for group in run.model.fused_optimizer.param_groups:
        group["lr"] = 0.025
    run.model.fused_optimizer.step()
    run.checkpointer.save("consistent")
    before = {shard.name: dict(shard.counters) for shard in run.checkpointer.shards}
    before = {
        name: {key: value.item() for key, value in counters.items()} for name, counters in before.items()
    }
    saved = run.values()
    run.train(2)
    run.checkpointer.close()

    again = start()
    again.checkpointer.load()
    assert_same(again.values(), saved)
    for shard in again.checkpointer.shards:
        assert {key: value.item() for key, value in shard.counters.items()} == before[shard.name]
        assert shard.counters["iter"].item() == 3
        assert shard.counters["learning_rate"].item() == pytest.approx(0.025)


def test_wish_7_a_save_larger_than_the_ceiling_stays_under_it(start, monkeypatch):
    """Ten rows a piece and two pieces of memory: fourteen pieces have to take turns."""
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    ceiling = WRITER_BYTES + 2 * PIECE_BYTES
    run = start(host_memory_bytes=ceiling)
    run.train(2)
    save = run.checkpointer.save("consistent")
    assert run.checkpointer._pool._num_made <= 2
    saved = run.values()
    run.checkpointer.close()
    assert sum(len(entry.chunks) for entry in save.manifest.rows) == 18
    again = start()
    again.checkpointer.load()
    assert_same(again.values(), saved)
