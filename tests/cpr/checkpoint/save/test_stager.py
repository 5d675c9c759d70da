"""Copying in the background: rows are of the moment of the call, and training waits only if it must."""

import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from cpr.checkpoint import checkpointer
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.config import WRITER_BYTES
from cpr.checkpoint.save import snapshot, stager, writer_thread
from cpr.checkpoint.save.snapshot import Snapshot
from cpr.checkpoint.save.staging import PIECE_BYTES
from cpr.errors import SaveFailedError, SaveGivenUpError
from cpr.shards import table_groups
from tests.cpr.checkpoint.runs import assert_same, reopened
from tests.cpr.shards import models

pytestmark = pytest.mark.usefixtures("world_of_one")

WAIT_S = 30.0


class Gate:
    """Stops copying in threads before the first piece until it is opened; what training copies passes."""

    def __init__(self, monkeypatch, copy=Snapshot.copy_next):
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.error = None
        self.copied_here = 0

        def copy_next(snap, buffer, step):
            if threading.current_thread() is threading.main_thread():
                self.copied_here += 1
            else:
                self.reached.set()
                assert self.opened.wait(WAIT_S), "the test never opened the gate"
                if self.error is not None:
                    raise self.error
            return copy(snap, buffer, step)

        monkeypatch.setattr(Snapshot, "copy_next", copy_next)

    def open_after(self, condition):
        """Open it once `condition()` has been true for a moment; gives the thread that looks."""

        def look():
            until = time.monotonic() + WAIT_S
            while not condition() and time.monotonic() < until:
                time.sleep(0.001)
            self.opened.set()

        thread = threading.Thread(target=look)
        thread.start()
        return thread


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.fixture
def waiting(monkeypatch):
    """Set once training stands still before an update."""
    waiting = threading.Event()
    join = threading.Thread.join

    def noted(thread, timeout=None):
        if thread.name == "checkpoint-stager":
            waiting.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    return waiting


def hold_storage(run):
    """No file is begun before the event is set."""
    create, opened = run.checkpointer._storage.create, threading.Event()

    @contextmanager
    def held(path):
        opened.wait(WAIT_S)
        with create(path) as sink:
            yield sink

    run.checkpointer._storage.create = held
    return opened


def save_rows(run):
    return run.checkpointer.save_rows({each.name: torch.arange(20) for each in run.checkpointer.shards})


def save_all(run):
    return run.checkpointer.save("consistent")


@pytest.mark.parametrize("begin", [save_all, save_rows])
def test_rows_are_of_the_moment_of_the_call_while_training_continues(start, monkeypatch, waiting, begin):
    run = start()
    run.save(2)
    run.train(1)
    gate = Gate(monkeypatch)
    expected = run.values()
    save = begin(run)
    assert gate.reached.wait(WAIT_S)
    before_s = save.blocked_s
    waiting.clear()
    opener = gate.open_after(waiting.is_set)
    run.train(4)
    opener.join()
    assert waiting.is_set(), "training changed rows that were not copied"
    assert gate.copied_here == 0
    assert save.blocked_s > before_s
    again = reopened(start, run)
    loaded = again.values()
    if save.kind == "rows":
        for name, value in expected.items():
            rows = slice(20) if name.startswith("ebc.") else ...
            assert torch.equal(loaded[name][rows], value[rows]), name
    else:
        assert_same(loaded, expected)


def test_a_forward_pass_does_not_wait_but_the_backward_pass_does(start, gate, waiting):
    run = start()
    tables = {name: value for name, value in run.values().items() if name.startswith("ebc.")}
    save = run.checkpointer.save("consistent")
    begun_s = save.blocked_s
    with torch.no_grad():
        run.model({"ebc": models.batch(0, 8, **run.rows)})
    loss = run.model({"ebc": models.batch(0, 8, **run.rows)}).square().mean()
    assert not gate.opened.is_set()
    assert not waiting.is_set()
    opener = gate.open_after(waiting.is_set)
    began = time.perf_counter()
    loss.backward()
    took_s = time.perf_counter() - began
    opener.join()
    assert run.checkpointer._stager._job is None
    assert 0 < save.blocked_s - begun_s <= took_s, "what the backward pass waited counts"
    assert not all(torch.equal(value, tables[name]) for name, value in run.values().items() if name in tables)


@pytest.mark.parametrize("call", ["step", "settle", "wait", "save", "load_shards"])
def test_the_next_call_waits_for_copying(start, gate, waiting, call):
    run = start()
    run.checkpointer.save("consistent")
    gate.opened.set()
    run.checkpointer.wait()
    gate.opened.clear()
    run.checkpointer.save("consistent")
    arguments = {"load_shards": [["ebc.embedding_bags.a/r0-c0"]]}.get(call, [])
    waiting.clear()
    opener = gate.open_after(waiting.is_set)
    getattr(run.checkpointer, call)(*arguments)
    assert waiting.is_set()
    opener.join()
    run.checkpointer.close()


def test_a_failed_copy_is_raised_at_the_next_call(start, gate):
    run = start()
    gate.opened.set()
    run.save()
    gate.error = RuntimeError("memory is broken")
    save = run.checkpointer.save("consistent")
    assert save.wait(WAIT_S)
    with pytest.raises(SaveFailedError, match=r"RuntimeError: memory is broken.*save 0 is the newest"):
        run.train(1)
    gate.error = None
    run.train(1)
    assert run.checkpointer.save("consistent").wait(WAIT_S)
    run.checkpointer.close()
    pool = run.checkpointer._pool
    assert len(pool._free) == pool._num_made, "every buffer came back"
    again = start()
    assert again.checkpointer.load().state.step == run.checkpointer.steps_done


def test_abandoning_while_rows_are_copied(start, gate, waiting):
    run = start()
    save = run.checkpointer.save("consistent")
    assert gate.reached.wait(WAIT_S)
    opener = gate.open_after(waiting.is_set)
    run.checkpointer.close(abandon=True)
    opener.join()
    assert run.checkpointer._stager._job is None
    assert save.manifest is None
    assert not any(group.emb_module._forward_hooks for group in table_groups(run.model))


def test_a_step_waits_for_the_writer_when_memory_is_short(start, monkeypatch, waiting):
    """The ceiling is two buffers: what does not fit is copied while the backward pass waits."""
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    run = start(host_memory_bytes=WRITER_BYTES + 2 * PIECE_BYTES)
    run.checkpointer.prepare()
    gate = hold_storage(run)
    expected = run.values()
    save = run.checkpointer.save("consistent")
    opener = threading.Thread(target=lambda: (waiting.wait(WAIT_S), gate.set()))
    opener.start()
    run.train(1)
    opener.join()
    assert run.checkpointer._pool._num_made == 2
    run.checkpointer.close()
    assert save.manifest is not None
    again = start()
    again.checkpointer.load()
    assert_same(again.values(), expected)


def test_a_wait_that_times_out_gives_the_save_up(start, monkeypatch):
    """Not even when the writer has every buffer and does not come back."""
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    run = start(host_memory_bytes=WRITER_BYTES + 2 * PIECE_BYTES)
    run.checkpointer.prepare()
    gate = hold_storage(run)
    save = run.checkpointer.save("consistent")
    assert not run.checkpointer.wait(0.05)
    assert run.checkpointer._stager._job is None
    gate.set()
    assert save.wait(WAIT_S)
    run.train(1)  # which is no failure: it was asked for
    assert isinstance(save.error, SaveGivenUpError)
    assert "longer than it was given" in str(save.error)


def test_tables_without_update_hooks_are_copied_at_once(monkeypatch, tmp_path):
    """Tables of an ordinary optimizer, including one that was not passed to the checkpointer."""
    gate = Gate(monkeypatch)
    torch.manual_seed(1)
    model = models.shard({"a": "dp", "b": "tw", "c": "unfused"}, ebc=models.bags(a=30, b=20, c=10))
    config = CheckpointConfig(uri=str(tmp_path))
    with Checkpointer(model, config) as checkpointer:
        save = checkpointer.save("consistent")
        assert gate.copied_here == 2
        expected = {each.name: each.weights.clone() for each in checkpointer.shards}
        for each in checkpointer.shards:
            if not each.updated_in_backward:
                each.weights.zero_()
        gate.opened.set()
        checkpointer.wait()
        assert len(save.manifest.rows) == 3
    with Checkpointer(model, config) as checkpointer:
        checkpointer.load()
        for each in checkpointer.shards:
            assert torch.equal(each.weights, expected[each.name])


def test_a_rolling_save_holds_an_update_up_for_the_piece_it_is_at(start, gate, waiting):
    name, rows = "ebc.embedding_bags.a/r0-c0/weights", {"a": 20, "b": 40}
    run = start(rows=rows)
    run.checkpointer.save("rolling")
    run.train(1)
    assert gate.reached.wait(WAIT_S)
    first = run.values()[name]
    waiting.clear()
    opener = gate.open_after(waiting.is_set)
    run.train(1)  # changes rows when the thread has copied its piece
    opener.join()
    assert waiting.is_set()
    second = run.values()[name]
    assert not torch.equal(first[:10], second[:10]), "or the test shows nothing"
    assert gate.copied_here == 0
    loaded = reopened(start, run, rows=rows).values()[name]
    assert torch.equal(loaded[:10], first[:10])
    assert torch.equal(loaded[10:20], second[10:20])


def test_a_rolling_save_that_waits_for_a_buffer_holds_no_update_up(start, monkeypatch):
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    monkeypatch.setattr(stager, "POLL_S", WAIT_S)
    run = start(host_memory_bytes=WRITER_BYTES + 2 * PIECE_BYTES)
    run.checkpointer.prepare()
    changed, waits = run.checkpointer._pool._changed, threading.Event()
    wait = changed.wait

    def noted(timeout_s):
        waits.set()
        return wait(timeout_s)

    monkeypatch.setattr(changed, "wait", lambda timeout_s: noted(timeout_s) if timeout_s else None)
    storage = hold_storage(run)
    save = run.checkpointer.save("rolling")
    run.train(1)
    assert waits.wait(WAIT_S)
    run.train(1)
    assert save.blocked_s < WAIT_S / 2
    assert not run.checkpointer._stager._job.is_copied
    storage.set()
    run.checkpointer.wait()
    assert save.manifest is not None


def test_a_rolling_save_copies_on_as_long_as_no_rows_change(start, gate):
    """Also when it has to wait for buffers: there are two, and 48 pieces."""
    run = start(rows={"a": 40, "b": 200}, host_memory_bytes=WRITER_BYTES + 2 * PIECE_BYTES)
    gate.opened.set()
    save = run.checkpointer.save("rolling")
    run.train(1)
    assert run.checkpointer._stager._background[0].join(WAIT_S) is None
    assert run.checkpointer._stager._job is None, "not everything was copied"
    run.checkpointer.wait()
    assert {(entry.first_step, entry.last_step) for entry in save.manifest.rows} == {(1, 1)}


def test_a_rolling_save_copies_a_limited_part_a_step_of_rows_that_cannot_wait(monkeypatch, tmp_path, gate):
    monkeypatch.setattr(stager, "ROLLING_BYTES_PER_STEP", 1)
    torch.manual_seed(1)
    model = models.shard({"a": "unfused"}, ebc=models.bags(a=30))
    with Checkpointer(model, CheckpointConfig(uri=str(tmp_path))) as checkpointer:
        save = checkpointer.save("rolling")
        for step in range(1, 4):
            assert gate.copied_here == step - 1
            checkpointer.step()
        checkpointer.wait()
    assert [(entry.first_step, entry.last_step) for entry in save.manifest.rows] == [(1, 3)]


class Pauses:
    """Stands in for `Save.hurry`, and is never set."""

    def __init__(self):
        self.asked_s = []

    def wait(self, timeout_s):
        self.asked_s.append(timeout_s)

    def set(self):
        """Somebody waits; ignored."""


def test_a_rolling_save_rests_after_each_piece_where_training_takes_all_cores(start, monkeypatch):
    monkeypatch.setattr(snapshot, "rows_per_piece", lambda _: 10)
    monkeypatch.setattr(checkpointer, "is_crowded", lambda: True)
    run = start()
    save = run.checkpointer.save("rolling")
    assert not save.hurry.is_set()
    save.hurry = pauses = Pauses()
    run.train(1)
    run.checkpointer.wait()
    pieces = sum(len(entry.chunks) for entry in save.manifest.rows)
    assert [pause_s > 0 for pause_s in pauses.asked_s] == [True] * pieces


@pytest.mark.parametrize("is_crowded", [False, True])
def test_a_save_is_written_at_full_speed_when_somebody_waits(start, monkeypatch, is_crowded):
    monkeypatch.setattr(checkpointer, "is_crowded", lambda: is_crowded)
    run = start()
    assert run.checkpointer.save("consistent").hurry.is_set(), "training may wait for its memory"
    save = run.checkpointer.save("rolling")
    assert save.hurry.is_set() != is_crowded
    run.train(1)
    run.checkpointer.wait()
    assert save.hurry.is_set()


@pytest.mark.parametrize(("threads", "workers", "is_crowded"), [(1, 4, True), (4, 1, True), (1, 3, False)])
def test_writing_is_in_the_way_where_training_takes_all_cores(monkeypatch, threads, workers, is_crowded):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    assert writer_thread.is_crowded() == is_crowded
