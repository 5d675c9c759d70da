"""The description of a directory, as JSON and as text for one screen."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import torch

from cpr.checkpoint.catalog.describe import describe
from cpr.checkpoint.catalog.describe_text import CHAIN_LINES, TABLE_LINES, as_text
from cpr.checkpoint.format.manifest import save_folder
from cpr.checkpoint.ownership.lock import DirectoryLock
from tests.cpr.checkpoint.saves import MemoryStorage, commit, make_shard, manifest_path, randomise, save

NOW = datetime(2026, 1, 1, 3, tzinfo=UTC)


def minutes_ago(minutes):
    return (NOW - timedelta(minutes=minutes)).isoformat()


@pytest.fixture
def directory():
    """An older base; a rolling base, and a row save of one of its tables."""
    storage, generator = MemoryStorage(), torch.Generator().manual_seed(1)
    shards = [make_shard("model.a"), make_shard("model.b", shape=(40, 4), states={})]
    for shard in shards:
        randomise(shard, generator)
    shards[0].weights.div_(3)  # so that fp16 is not exact
    save(storage, 0, shards, created=minutes_ago(600), step=0)
    base = save(storage, 3, shards, created=minutes_ago(60), step=35, moment="rolling", world_size=2)
    rows = {"model.a/r0-c0": torch.arange(10)}
    save(storage, 4, shards, base, rows, codec="fp16", created=minutes_ago(5), step=42, world_size=2)
    return storage


def test_the_newest_state_and_its_chain(directory):
    about = describe(directory, NOW)
    assert (about.run_id, about.world_size, about.num_states) == ("run-a", 2, 3)
    assert [(each.sequence, each.kind, each.moment, each.step) for each in about.chain] == [
        (3, "base", "rolling", 35),
        (4, "rows", "consistent", 42),
    ]
    assert [each.age_s for each in about.chain] == [3600, 300]
    assert [each.codec for each in about.chain] == ["exact", "fp16"]
    assert about.chain[0].max_error == 0
    assert 0 < about.chain[1].max_error < 0.01
    assert [each.sequence for each in about.older] == [0]
    stored = sum(len(data) for path, data in directory.files.items() if not path.endswith("manifest.json"))
    assert about.num_bytes == stored
    as_json = json.loads(json.dumps(about.to_json()))
    assert as_json["chain"][1]["sequence"] == 4
    assert as_json["tables"][0]["optimizer_state"] == {"sum": 400}


def test_how_stale_the_rows_of_each_table_are(directory):
    """Save n of the helper has rows of step 10 n: the base is of 30, the row save on table a of 40."""
    a, b = describe(directory, NOW).tables
    assert (a.fqn, a.newest_behind_steps, a.oldest_behind_steps) == ("model.a", 2, 12)
    assert (b.fqn, b.newest_behind_steps, b.oldest_behind_steps) == ("model.b", 12, 12)


def test_rows_newer_than_the_state_are_not_behind_it():
    """A rolling save that began at step 8 and copied its rows at step 10."""
    storage = MemoryStorage()
    save(storage, 1, [make_shard()], step=8, moment="rolling")
    (table,) = describe(storage, NOW).tables
    assert (table.newest_behind_steps, table.oldest_behind_steps) == (0, 0)


def test_saves_that_do_not_count_are_named_with_the_reason(directory):
    directory.files[f"{save_folder(7)}/model.a/r0-c0.arrow"] = b"half"
    directory.files[manifest_path(6)] = b"{}"
    about = describe(directory, NOW)
    assert [(each.sequence, each.unfinished) for each in about.refused] == [(7, True), (6, False)]
    text = as_text(about)
    assert all(each.reason in text for each in about.refused)
    storage = MemoryStorage()
    assert describe(storage, NOW) is None
    storage.files[manifest_path(0)] = b"{}"
    assert "Nothing here can be loaded" in as_text(describe(storage, NOW))


def test_describe_shows_the_owner(directory):
    assert describe(directory, NOW).owner is None
    lock = DirectoryLock(directory, "run-b")
    lock.acquire(list)
    assert describe(directory, NOW).owner.run == "run-b"
    assert "owner   run 'run-b' (process" in as_text(describe(directory, NOW))
    lock.finish(500)
    assert "finished at step 500" in as_text(describe(directory, NOW))
    lock.release()


def test_the_text_shows_states_ranks_ages_and_codecs(directory):
    text = as_text(describe(directory, NOW))
    for part in (
        "3 states",
        "run-a",
        "2 ranks",
        "save 4 at step 42",
        "5 min ago",
        "rolling",
        "fp16",
        "2 to 12",
    ):
        assert part in text


def test_long_chains_and_many_tables_fit_a_screen():
    storage = MemoryStorage()
    shards = [make_shard(f"model.t{number}", shape=(4 + number, 2)) for number in range(100)]
    newest = save(storage, 0, shards)
    for sequence in range(1, 50):
        newest = commit(storage, sequence, newest)
    lines = as_text(describe(storage, NOW)).splitlines()
    assert len(lines) < CHAIN_LINES + TABLE_LINES + 15
    assert any(line.startswith("  ... 41 row saves more") for line in lines)
    assert any(line.startswith("  ... 70 smaller tables") for line in lines)
    assert sum(line.lstrip().startswith("49 ") for line in lines) == 1
    assert not any("model.t69 " in line for line in lines)
    assert any("model.t70 " in line for line in lines)
