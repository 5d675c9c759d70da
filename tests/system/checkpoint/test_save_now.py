"""A save with a time limit: one verdict for all ranks, whichever of them is slow."""

import logging
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.save import snapshot
from cpr.checkpoint.save.snapshot import Snapshot
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import SaveFailedError
from cpr.recovery.run.progress import RunProgress
from cpr.saving.cadence import FixedPace
from cpr.saving.periodic import Saves
from tests.cpr.shards import models

ROWS = {"a": 100, "b": 40}
TIMEOUT_S = 0.4
SLOW_S = 0.1
"""For each of the pieces that rank 1 copies."""


class Trained:
    """A model that does not change, and its saves."""

    def __init__(self, folder):
        snapshot.rows_per_piece = lambda _: 2
        model = models.shard({"a": "rw", "b": "rw"}, ebc=models.bags(**ROWS))
        self.checkpointer = Checkpointer(model, CheckpointConfig(uri=str(folder)))
        self.checkpointer.prepare()
        self.course = RunProgress()
        self.saves = Saves(self.checkpointer, self.course, FixedPace(0), "rolling")

    def step(self):
        self.course.step(1)
        self.saves.step()

    def now(self, timeout_s):
        """What `now` comes to on this rank: a verdict, or the error."""
        try:
            return self.saves.now(timeout_s)
        except SaveFailedError as error:
            return str(error)


@contextmanager
def slow_copy():
    """Rank 1 copies slowly."""
    copy = Snapshot.copy_next

    def copy_next(*arguments):
        time.sleep(SLOW_S * dist.get_rank())
        return copy(*arguments)

    Snapshot.copy_next = copy_next
    try:
        yield
    finally:
        Snapshot.copy_next = copy


@contextmanager
def stuck_storage():
    """Rank 1 cannot write before the end of the block."""
    create, gate = LocalStorage.create, threading.Event()

    @contextmanager
    def held(self, path):
        if dist.get_rank() == 1:
            gate.wait(30)
        with create(self, path) as sink:
            yield sink

    LocalStorage.create = held
    try:
        yield
    finally:
        gate.set()
        LocalStorage.create = create


@contextmanager
def out_of_time():
    """Rank 1 has no time left when it comes to save."""
    yield


def agreed(verdict):
    """The verdict of all ranks."""
    verdicts = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    assert len(set(verdicts)) == 1, verdicts
    return verdict


def save_now(folder):
    errors = []
    logging.getLogger("cpr").addHandler(record := logging.Handler(logging.ERROR))
    record.emit = errors.append
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for trouble in (slow_copy, stuck_storage, out_of_time):
        run = Trained(folder / trouble.__name__)
        run.step()
        with trouble():
            late = trouble is out_of_time and rank == 1
            assert agreed(run.now(-1.0 if late else TIMEOUT_S)) is False, trouble
            run.step()  # what was given up is no failure
        assert agreed(run.now(None)) is True
        assert agreed(run.checkpointer.newest_step) == 2
        run.step()
        with slow_copy():
            assert agreed(run.now(TIMEOUT_S)) is False
        run.saves.finish()  # at the same step
        with run_again(folder / trouble.__name__) as again:
            assert again.load().state.step == 3
    assert not errors, [each.getMessage() for each in errors]
    _fail_on_one_rank(folder / "failing")
    dist.barrier()
    dist.destroy_process_group()


def _fail_on_one_rank(folder):
    """A failure is raised on all ranks alike, although one of them stops waiting sooner."""
    run = Trained(folder)
    run.step()
    copy = Snapshot.copy_next

    def broken(*arguments):
        if dist.get_rank() == 1:
            raise OSError("no such device")
        return copy(*arguments)

    Snapshot.copy_next = broken
    try:
        verdict = agreed(run.now(30))
    finally:
        Snapshot.copy_next = copy
    assert "rank 1: OSError: no such device" in verdict
    assert agreed(run.now(None)) is True
    run.saves.finish()


@contextmanager
def run_again(folder):
    """A checkpointer that loads what was saved."""
    model = models.shard({"a": "rw", "b": "rw"}, ebc=models.bags(**ROWS))
    checkpointer = Checkpointer(model, CheckpointConfig(uri=str(folder)))
    yield checkpointer
    checkpointer.close()


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_save_given_up_on_one_rank_is_given_up_on_all(start_ranks, tmp_path):
    start_ranks(save_now, tmp_path, world_size=2).wait(timeout_s=100)
