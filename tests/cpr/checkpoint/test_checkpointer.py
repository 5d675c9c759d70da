"""The checkpointer on one rank: saving in the background, reported failures, and loading."""

import errno
import os
import random
import stat
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from cpr.checkpoint import checkpointer as module
from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.committer import Retention
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer, SaveRequest, agree
from cpr.checkpoint.save import snapshot
from cpr.checkpoint.save import stager as copier
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import (
    CheckpointError,
    CorruptFileError,
    MismatchError,
    NothingSavedError,
    NoUsableStateError,
    SaveFailedError,
)
from cpr.faults.storages import FaultyStorage
from tests.cpr.checkpoint.runs import assert_same, flip_bit, reopened
from tests.cpr.checkpoint.saves import MemoryStorage
from tests.cpr.shards import models

pytestmark = pytest.mark.usefixtures("world_of_one")


class StaysSet(Event):
    """Event that is set and cannot be cleared."""

    def is_set(self):
        return True


@pytest.fixture
def small_pieces(monkeypatch):
    """Ten rows a piece; of a rolling save one piece a step, as if training always waited to change rows."""
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    monkeypatch.setattr(copier, "_Job", partial(copier._Job, is_waited_for=StaysSet()))


def fail_when(storage, condition, error):
    """Let `create` of matching paths fail."""
    create = storage.create

    @contextmanager
    def failing(path):
        if condition(path):
            raise error
        with create(path) as sink:
            yield sink

    storage.create = failing


def states_of(run):
    return find_states(open_storage(run.checkpointer._config.uri))


@pytest.mark.parametrize("moment", ["consistent", "rolling"])
def test_a_save_loads_exactly(start, moment):
    run = start()
    run.train(3)
    run.checkpointer.save(moment)
    run.checkpointer.wait()
    saved = run.values()
    run.train(2)
    run.checkpointer.close()

    again = start()
    loaded = again.checkpointer.load()
    assert_same(again.values(), saved)
    assert (loaded.state.step, loaded.rejected, loaded.same_ranks) == (3, (), True)


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


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_decides_who_may_read_a_checkpoint(start, tmp_path, umask):
    before = os.umask(umask)
    try:
        run = start()
        run.save(1)
        run.checkpointer.close()
    finally:
        os.umask(before)
    paths = list(Path(open_storage(run.checkpointer._config.uri).uri).rglob("*"))
    assert {path.suffix for path in paths} >= {".arrow", ".json"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_a_warm_start_loads_the_model_and_the_named_states_and_only_reads(start, tmp_path):
    other = start("other")
    other.save(3)
    saved = other.values()
    other.checkpointer.close()
    files = {path: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()}

    run = start()
    own = run.optimizer.state_dict()
    assert run.checkpointer.warm_start(str(tmp_path / "other"), []).step == 3
    assert run.optimizer.state_dict() == own
    assert run.checkpointer.warm_start(str(tmp_path / "other"), ["optimizer"]).step == 3
    assert_same(run.values(), {**saved, "steps": torch.tensor(0)})
    assert run.checkpointer.load() is None, "nothing is saved in its own directory"
    run.save(1)
    assert run.checkpointer.newest_step == 1
    assert {path: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()} == files
    with pytest.raises(NothingSavedError, match=r"nothing was ever saved in .*empty"):
        run.checkpointer.warm_start(str(tmp_path / "empty"), [])
    with pytest.raises(MismatchError, match="'loader' is registered"):
        run.checkpointer.warm_start(str(tmp_path / "other"), ["loader"])


def test_random_generators_are_restored(start):
    def draw():
        return [random.random(), np.random.random(), torch.rand(()).item()]

    run = start()
    run.save()
    expected = draw()
    reopened(start, run)
    assert draw() == expected


def test_a_rolling_save_takes_a_piece_a_step_and_says_which_steps(start, small_pieces):
    run = start()
    run.train(1)
    save = run.checkpointer.save("rolling")
    steps = 0
    while run.checkpointer._stager._job is not None:
        run.train(1)
        run.checkpointer.settle()
        steps += 1
    run.checkpointer.close()
    assert steps == 18  # ten pieces of a, four of each half of b
    assert [(entry.first_step, entry.last_step) for entry in save.manifest.rows] == [
        (2, 11),
        (12, 15),
        (16, 19),
    ]
    assert save.manifest.step == 1, "the state is of the moment when it began"


def test_a_row_save_restores_its_rows_and_dense_parameters(start):
    run = start()
    run.train(2)
    run.checkpointer.save("consistent")
    base = run.values()
    run.train(2)
    run.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.tensor([5, 3, 5, 99])})
    newer = run.values()
    run.train(1)
    run.checkpointer.close()

    again = start()
    loaded = again.checkpointer.load()
    assert [save.kind for save in loaded.state.saves] == ["base", "rows"]
    for name, value in again.values().items():
        expected = newer[name].clone()
        if name.startswith("ebc."):
            expected = base[name].clone()
            if name.startswith("ebc.embedding_bags.a/"):
                expected[[3, 5, 99]] = newer[name][[3, 5, 99]]
        assert torch.equal(value, expected), name


def test_a_committed_save_knows_its_blocked_time(start):
    run = start()
    run.train(1)
    for began in (None, time.perf_counter() - 10):
        if began is None:
            save = run.checkpointer.save("consistent")
        else:
            save = run.checkpointer.save_rows({}, began=began)
        assert run.checkpointer.wait()
        assert save.longest_blocked_s == pytest.approx(save.blocked_s, abs=0.5)
    assert save.longest_blocked_s > 10, "time in which rows were chosen counts"


def test_wish_5_an_interval_in_which_no_row_was_touched_is_a_valid_tiny_save(start):
    run = start()
    base = run.checkpointer.save("consistent")
    run.checkpointer.save_rows({})
    tiny = run.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.empty(0, dtype=torch.int64)})
    run.checkpointer.close()
    assert tiny.manifest.rows == ()
    assert tiny.manifest.num_bytes < base.manifest.num_bytes
    again = start()
    assert again.checkpointer.load().state.sequence == 2


def test_a_long_chain_is_merged_into_a_new_base_with_the_same_rows(start):
    run = start(merge_after=2)
    run.checkpointer.save("consistent")
    for _ in range(3):
        run.train(1)
        run.checkpointer.save_rows(
            {shard.name: torch.arange(shard.num_rows) for shard in run.checkpointer.shards}
        )
    run.checkpointer.wait()
    expected = run.values()
    run.checkpointer.save_rows({})
    run.checkpointer.close()
    states, rejected = states_of(run)
    assert [save.kind for save in states[0].saves] == ["base", "rows"]
    assert states[0].saves[0].merged == (0, 1, 2, 3)
    assert not rejected
    again = start()
    again.checkpointer.load()
    assert_same(again.values(), expected)


def test_a_failed_save_reaches_training_with_the_files_name_and_leaves_older_ones(start):
    run = start()
    run.save(1)
    fail_when(run.checkpointer._storage, lambda path: "state.arrow" in path, OSError("the disk says no"))
    save = run.checkpointer.save("consistent")
    save.wait()
    with pytest.raises(SaveFailedError, match=r"rank 0: OSError: the disk says no.*save 0 is the newest"):
        run.train(1)
    assert save.manifest is None
    run.train(1)  # raised once
    states, rejected = states_of(run)
    assert [state.sequence for state in states] == [0]
    assert not rejected, "what the failed save had written is gone"
    pool = run.checkpointer._pool
    assert len(pool._free) == pool._num_made, "every buffer came back"


def test_the_next_save_waits_or_is_skipped(start):
    run = start(when_busy="skip")
    gate = threading.Event()
    create = run.checkpointer._storage.create

    @contextmanager
    def slow(path):
        gate.wait(30)
        with create(path) as sink:
            yield sink

    run.checkpointer.prepare()
    run.checkpointer._storage.create = slow
    first = run.checkpointer.save("consistent")
    assert run.checkpointer.save("consistent") is None
    run.train(2)  # training does not wait for the storage
    assert not first.done
    gate.set()
    run.checkpointer.wait()
    assert run.checkpointer.save("consistent") is not None
    run.checkpointer.close()


def test_loading_from_an_empty_directory(start):
    checkpointer = start().checkpointer
    assert checkpointer.all_steps() == []
    assert checkpointer.load() is None
    with pytest.raises(ValueError, match="no state of step 3; steps that can be loaded: none"):
        checkpointer.load(step=3)
    with pytest.raises(NothingSavedError, match="save once"):
        checkpointer.load_shards([checkpointer.shards[0].name])
    assert checkpointer.newest_state() is None
    checkpointer.continue_live(steps_done=7)
    checkpointer.save("consistent")
    checkpointer.wait_until_idle()
    assert checkpointer.newest_step == checkpointer.newest_state().step == 7


def test_a_chosen_step_is_loaded_and_the_next_save_becomes_the_newest(start, caplog):
    options = {"merge_after": 0, "retention": Retention(keep_last=5)}
    run, saved = start(**options), {}
    for _ in range(3):
        run.save(1)
        saved[run.checkpointer.steps_done] = run.values()
    assert run.checkpointer.all_steps() == [1, 2, 3]
    run.checkpointer.close()

    again = start(**options)
    with pytest.raises(ValueError, match=r"no state of step 7; steps that can be loaded: 1, 2, 3"):
        again.checkpointer.load(step=7)
    loaded = again.checkpointer.load(step=1)
    assert ([each.sequence for each in loaded.rejected], caplog.text) == ([1, 2], "")
    assert_same(again.values(), saved[1])
    again.checkpointer.step()
    again.checkpointer.save_rows({})
    again.checkpointer.wait_until_idle()
    assert_same(again.values(), {**saved[1], "steps": torch.tensor(2)})
    again.checkpointer.load(step=3)
    assert_same(again.values(), saved[3])
    again.checkpointer.close()
    (newest, *_), _ = states_of(again)
    assert [save.sequence for save in newest.saves] == [0, 3]


@pytest.mark.parametrize("resume", [Checkpointer.load, lambda checkpointer: checkpointer.continue_live(4)])
def test_a_restart_reads_each_manifest_once(start, monkeypatch, resume):
    storage = MemoryStorage()
    monkeypatch.setattr(module, "open_storage", lambda uri: storage)
    run = start(merge_after=0)
    for number in range(4):
        run.checkpointer.save_rows({}) if number else run.checkpointer.save("consistent")
        run.checkpointer.wait_until_idle()
    run.checkpointer.close()
    again = start(merge_after=0)
    storage.reads.clear()
    again.checkpointer.claim()
    again.checkpointer.newest_state()
    resume(again.checkpointer)
    again.checkpointer.load_shards([again.checkpointer.shards[0].name])
    again.checkpointer.prepare()
    reads = Counter(path for path, _, _ in storage.reads if path.endswith("manifest.json"))
    assert list(reads.values()) == [1] * 4


def test_row_saves_need_a_base_of_this_plan(start):
    run = start()
    with pytest.raises(ValueError, match=r"call save\(\) first"):
        run.checkpointer.save_rows({})
    assert not run.checkpointer.has_base
    run.save()
    assert run.checkpointer.has_base
    again = reopened(start, run, layout={"a": "cw", "b": "tw"})
    again.checkpointer.prepare()
    assert not again.checkpointer.has_base
    with pytest.raises(MismatchError, match="under another sharding plan"):
        again.checkpointer.save_rows({again.checkpointer.shards[0].name: torch.tensor([1])})
    again.checkpointer.save("consistent")
    again.checkpointer.save_rows({again.checkpointer.shards[0].name: torch.tensor([1])})
    again.checkpointer.close()


def test_wish_6_a_damaged_save_falls_back_to_the_previous_complete_one(start, tmp_path, caplog):
    run = start()
    run.train(1)
    run.checkpointer.save("consistent")
    expected = run.values()
    run.save(1)
    run.checkpointer.close()
    damaged = tmp_path / "checkpoint/saves/00000001-1/ebc.embedding_bags.a/r0-c0.arrow"
    flip_bit(damaged)

    again = start()
    loaded = again.checkpointer.load()
    assert loaded.state.sequence == 0
    assert "ebc.embedding_bags.a/r0-c0.arrow" in loaded.rejected[0].reason
    assert "fell back to save 0 of step 1" in caplog.text
    assert loaded.rejected[0].reason in caplog.text
    assert_same(again.values(), expected)
    again.save(1)
    again.checkpointer.close()
    kept = tmp_path / "checkpoint/saves/00000000-1/manifest.json"
    assert kept.exists(), "the damaged save does not count as one of the two that are kept"
    last = start()
    assert last.checkpointer.load().state.sequence == 2


def test_a_save_that_failed_to_load_during_a_run_pushes_no_older_save_out(start, tmp_path):
    run = start(merge_after=0, retention=Retention(keep_last=2))
    for _ in range(2):
        run.save(1)
    (tmp_path / "checkpoint/saves/00000001-1/state.arrow").write_bytes(b"")
    assert run.checkpointer.load().state.sequence == 0
    run.save(1)
    run.checkpointer.close()
    (tmp_path / "checkpoint/saves/00000002-1/state.arrow").write_bytes(b"")
    assert start().checkpointer.load().state.sequence == 0


def test_when_nothing_verifies_every_reason_is_listed(start, tmp_path):
    run = start()
    for _ in range(2):
        run.checkpointer.save("consistent")
    run.checkpointer.close()
    for sequence in (0, 1):
        (tmp_path / f"checkpoint/saves/0000000{sequence}-1/state.arrow").write_bytes(b"")
    with pytest.raises(NoUsableStateError, match=r"(?s)save 1: .*save 0: "):
        start().checkpointer.load()


def test_before_save_can_refuse_a_save(start):
    refused = []

    def check():
        if refused:
            raise FloatingPointError("a parameter is nan")

    run = start(before_save=check, retention=Retention(keep_last=2))
    for _ in range(2):
        run.save(1)
    refused.append(True)
    for save in (run.checkpointer.save, lambda: run.checkpointer.save_rows({})):
        with pytest.raises(FloatingPointError, match="a parameter is nan"):
            save()
    run.checkpointer.close()
    states, _ = states_of(run)
    assert {state.step for state in states} == {1, 2}


def test_a_refusal_on_one_rank_is_raised_on_all():
    fine = SaveRequest("base", "consistent", 3, is_ready=True, replicated={}, problem=None)
    with pytest.raises(FloatingPointError, match="nan"):
        agree(fine, [fine, replace(fine, problem=FloatingPointError("nan"))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory_bytes": 1}, "needs at least"),
        ({"codec": "int3"}, "choose one of"),
        ({"when_busy": "later"}, "choose one of wait, skip"),
        ({"merge_after": -1}, "must not be negative"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(uri="anywhere", **options)


class Lazy:
    """A replicated table that Adam updates, which makes its state in the first step, and its checkpointer."""

    def __init__(self, folder, seed):
        torch.manual_seed(seed)
        self.model = models.shard({"a": "dp"}, ebc=models.bags(a=30))
        tables = [each for name, each in self.model.named_parameters() if "embedding_bags" in name]
        self.optimizer = torch.optim.Adam(tables, lr=0.1)
        config = CheckpointConfig(uri=str(folder))
        self.checkpointer = Checkpointer(self.model, config, [self.optimizer])

    def train(self, step):
        self.optimizer.zero_grad()
        self.model({"ebc": models.batch(step, 8, a=30)}).square().mean().backward()
        self.optimizer.step()

    def columns(self):
        return {name: column.clone() for name, column in self.checkpointer.shards[0].columns.items()}


def test_a_lazy_optimizer_of_replicated_tables_is_loaded_into_a_model_that_never_trained(tmp_path):
    """Adam makes its state in the first step; a resumed run loads before that."""
    run = Lazy(tmp_path, 1)
    for step in range(3):
        run.train(step)
    run.checkpointer.save("consistent")
    run.checkpointer.close()
    run.train(3)

    again = Lazy(tmp_path, 2)
    again.checkpointer.load()
    again.checkpointer.close()
    again.train(3)
    for ours, theirs in zip(again.model.parameters(), run.model.parameters(), strict=True):
        if ours.shape[0] == 30:
            assert torch.equal(ours, theirs)
    assert again.optimizer.state_dict()["state"][0]["step"] == run.optimizer.state_dict()["state"][0]["step"]


def test_optimizer_state_created_during_a_rolling_save_is_saved_with_its_rows(tmp_path):
    run = Lazy(tmp_path, 1)
    run.checkpointer.save("rolling")
    run.train(0)
    run.checkpointer.step()  # all is copied now, and no longer of the moment when the save began
    saved = run.columns()
    run.train(1)
    run.checkpointer.close()
    again = Lazy(tmp_path, 2)
    again.checkpointer.load()
    again.checkpointer.close()
    assert saved.keys() == {"weights", "exp_avg", "exp_avg_sq"}
    assert_same(again.columns(), saved)


def test_optimizer_state_created_after_copying_is_not_saved(tmp_path, monkeypatch):
    run = Lazy(tmp_path, 1)
    run.checkpointer.prepare()
    trained, create = threading.Event(), run.checkpointer._storage.create

    def slow(path):
        assert trained.wait(60)
        return create(path)

    monkeypatch.setattr(run.checkpointer._storage, "create", slow)
    saved = run.columns()
    run.checkpointer.save("consistent")
    run.train(0)
    trained.set()
    run.checkpointer.close()
    again = Lazy(tmp_path, 2)
    again.checkpointer.load()
    again.checkpointer.close()
    assert_same(again.columns(), saved)


def test_the_caller_may_reuse_its_tensor_of_ids(start):
    run = start()
    run.checkpointer.save("consistent")
    run.train(1)
    ids = torch.tensor([1, 2, 3])
    expected = run.values()["ebc.embedding_bags.a/r0-c0/weights"][ids]
    run.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": ids})
    ids.copy_(torch.tensor([1, 50, 60]))
    again = reopened(start, run)
    assert torch.equal(again.values()["ebc.embedding_bags.a/r0-c0/weights"][[1, 2, 3]], expected)


def test_state_that_cannot_be_saved_raises_and_blocks_no_later_step(start):
    class Broken:
        def state_dict(self):
            raise RuntimeError("no state today")

    run = start()
    run.checkpointer.register("broken", Broken())
    with pytest.raises(SaveFailedError, match="RuntimeError: no state today"):
        run.checkpointer.save("rolling")
    run.train(1)
    run.checkpointer.close()


def test_saves_made_between_loading_and_claiming_are_noticed(start):
    old = start()
    old.save(1)
    new = start()
    new.checkpointer.load()
    old.save(1)
    old.checkpointer.close()
    with pytest.raises(MismatchError, match="holds save 1, which this run has not loaded"):
        new.checkpointer.save("consistent")
    new.checkpointer.load()
    assert new.checkpointer.save("consistent") is not None
    new.checkpointer.close()


def test_storage_that_fails_for_a_moment_does_not_cost_the_newest_state(start, monkeypatch):
    run = start()
    for _ in range(2):
        run.train(1)
        run.checkpointer.save("consistent")
    run.checkpointer.close()
    faulty = FaultyStorage(open_storage(run.checkpointer._config.uri))
    monkeypatch.setattr(module, "open_storage", lambda uri: faulty)
    again = start()
    faulty.fail("read", "saves/00000001-1/ebc", number=errno.EMFILE)
    with pytest.raises(CheckpointError, match="Too many open files"):
        again.checkpointer.load()
    faulty.heal()
    assert again.checkpointer.load().state.sequence == 1


def test_after_closing_nothing_is_saved(start):
    run = start()
    run.checkpointer.close()
    run.checkpointer.close()
    for call in (run.checkpointer.save, run.checkpointer.load):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_load_shards_restores_only_the_given_ranges(start):
    run = start()
    run.save(2)
    saved = run.values()
    run.train(2)
    alive = run.values()
    first, *_ = run.checkpointer.shards
    _, part, _ = run.checkpointer.load_shards([first.name], {first.name: [(10, 20), (90, 100)]})
    back = torch.zeros(first.num_rows, dtype=torch.bool)
    back[10:20] = back[90:100] = True
    for name in first.columns:
        value, old, live = (each[f"{first.name}/{name}"] for each in (run.values(), saved, alive))
        assert torch.equal(value[back], old[back])
        assert torch.equal(value[~back], live[~back])
    for name, value in run.values().items():
        if not name.startswith(first.name):
            assert torch.equal(value, alive[name]), name
    with pytest.raises(ValueError, match="this rank has no shard"):
        run.checkpointer.load_shards(["elsewhere"])
    _, whole, _ = run.checkpointer.load_shards([first.name])
    assert whole < 40_000, "other shards were not read"
    assert part <= whole  # a chunk is read once, whatever is wanted of it
    with pytest.raises(ValueError, match=r"rows 90 to 100 were asked of .* holds rows 0 to 99"):
        run.checkpointer.load_shards([first.name], {first.name: [(90, 101)]})


def test_a_live_model_continues_the_chain_of_its_run(start):
    run = start(merge_after=0)
    run.save(2)
    run.checkpointer.close()
    live = start(merge_after=0)
    live.train(3)
    values = live.values()
    live.checkpointer.continue_live(steps_done=3)
    assert_same(live.values(), values)  # nothing is loaded
    live.checkpointer.save_rows({live.checkpointer.shards[0].name: torch.tensor([1])})
    live.checkpointer.wait()
    (newest, *_), _ = states_of(live)
    assert [save.sequence for save in newest.saves] == [0, 1]
    assert len({save.run_id for save in newest.saves}) == 1
    assert newest.step == 3


def test_continue_live_reports_newer_damaged_saves(start, tmp_path):
    run = start(merge_after=0)
    for _ in range(2):
        run.save(1)
    run.checkpointer.close()
    manifest = tmp_path / "checkpoint/saves/00000001-1/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    newest, damaged = start().checkpointer.continue_live(steps_done=3)
    assert (newest.sequence, newest.step) == (0, 1)
    assert [each.sequence for each in damaged] == [1]


def test_a_registered_state_can_be_read_without_loading(start):
    run = start()
    run.save(2)
    state = run.checkpointer.newest_state()
    run.train(1)
    values = run.values()
    saved = run.checkpointer.registered_in(state, "optimizer")
    assert saved["state"].keys() == run.optimizer.state_dict()["state"].keys()
    assert {float(each["step"]) for each in saved["state"].values()} == {2.0}
    assert_same(run.values(), values)
    with pytest.raises(CorruptFileError, match="holds no 'loader'"):
        run.checkpointer.registered_in(state, "loader")


def test_is_free_while_no_save_is_running(start, small_pieces):
    run = start()
    run.checkpointer.prepare()
    assert run.checkpointer.is_free()
    run.checkpointer.save("rolling")
    assert not run.checkpointer.is_free()
    run.checkpointer.wait_until_idle()
    assert run.checkpointer.is_free()
    fail_when(run.checkpointer._storage, lambda path: path.endswith(".arrow"), OSError(errno.ENOSPC, "full"))
    save = run.checkpointer.save("consistent")
    assert save.wait_until_over(30)
    with pytest.raises(SaveFailedError, match="full"):
        run.checkpointer.is_free()
    assert run.checkpointer.is_free(), "raised once"
