"""The wishes 1 to 7 of `requirements-from-users.md`, one test each, as a user of the library would see them.

More carry a wish in their names: resharding over real ranks (2, tests/system/checkpoint/test_resharding.py),
kills at every moment (6, tests/system/checkpoint/test_crash.py).
"""

import json
import shutil

import pytest
import torch

from cpr.checkpoint.config import WRITER_BYTES
from cpr.checkpoint.save import snapshot
from cpr.checkpoint.save.staging import PIECE_BYTES
from cpr.cli.main import entry as cpr
from tests.cpr.checkpoint.runs import assert_same


def test_wish_1_one_call_saves_one_call_loads_and_people_can_read_it(start, tmp_path, capsys):
    run = start()
    run.train(3)
    run.checkpointer.save()
    run.checkpointer.close()
    saved = run.values()
    again = start()
    again.checkpointer.load()
    assert {name: value.shape for name, value in again.values().items()} == {
        name: value.shape for name, value in saved.items()
    }

    manifest = json.loads((tmp_path / "checkpoint/saves/00000000-1/manifest.json").read_text())
    assert manifest["tables"]["ebc.embedding_bags.a"]["rows"] == 100
    assert {entry["table_fqn"] for entry in manifest["rows"]} == set(manifest["tables"])
    assert cpr(["describe", str(tmp_path / "checkpoint")]) == 0
    said = capsys.readouterr().out
    assert "ebc.embedding_bags.a" in said
    assert "ebc.embedding_bags.b" in said


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


@pytest.mark.parametrize("fault", ["gap", "duplicate", "stranger", "wrong order"])
def test_wish_4_increments_notice_what_does_not_belong(start, tmp_path, fault):
    for folder in ("checkpoint", "other"):
        run = start(folder)
        run.checkpointer.save("consistent")
        for _ in range(3):
            run.train(1)
            run.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.arange(50)})
        run.checkpointer.close()
    saves = tmp_path / "checkpoint/saves"
    if fault == "gap":
        shutil.rmtree(saves / "00000002-1")
        newest, rejected = 1, {3}
    elif fault == "duplicate":
        shutil.copytree(saves / "00000003-1", saves / "00000004-1")
        newest, rejected = 3, {4}
    elif fault == "stranger":
        shutil.rmtree(saves / "00000003-1")
        shutil.copytree(tmp_path / "other/saves/00000003-1", saves / "00000003-1")
        newest, rejected = 2, {3}
    else:
        (saves / "00000003-1").rename(saves / "hold")
        (saves / "00000002-1").rename(saves / "00000003-1")
        (saves / "hold").rename(saves / "00000002-1")
        newest, rejected = 1, {2, 3}
    again = start()
    loaded = again.checkpointer.load()
    assert loaded.state.step == newest
    assert {each.sequence for each in loaded.rejected} == rejected
    assert all(f"{each.sequence:08d}" in each.reason for each in loaded.rejected)


def test_wish_5_an_interval_without_touched_rows(start):
    run = start()
    run.checkpointer.save("consistent")
    run.checkpointer.save_rows({})
    run.checkpointer.close()
    assert start().checkpointer.load().state.sequence == 1


def test_wish_6_marked_complete_verified_on_load_and_fallen_back_from_once(start, tmp_path):
    run = start()
    for _ in range(2):
        run.train(1)
        run.checkpointer.save("consistent")
    run.checkpointer.close()
    state = tmp_path / "checkpoint/saves/00000001-1/state.arrow"
    state.write_bytes(state.read_bytes()[:-7])
    again = start()
    loaded = again.checkpointer.load()
    assert (loaded.state.step, [each.sequence for each in loaded.rejected]) == (1, [1])
    assert "state.arrow" in loaded.rejected[0].reason


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
