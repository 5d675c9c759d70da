"""Wish 3 of `requirements-from-users.md`; the others are tested with the parts that fulfil them."""

import pytest

from tests.cpr.checkpoint.runs import assert_same


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
