"""State of a GPU reaches the replica a step later, with stand-ins for the GPU's events."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpr.recovery.worker import memory
from cpr.recovery.worker.memory import Publisher
from cpr.resident.late_state import LateState
from cpr.resident.replica import Replica
from cpr.resident.status_page import StatusPage
from tests.cpr.resident.shards import make_shard


class Event:
    """Of a copy that arrives when it is waited for, or is told to have."""

    def __init__(self, calls):
        self.calls, self.has_arrived = calls, False

    def record(self):
        self.calls.append("begin")

    def synchronize(self):
        self.calls.append("wait")
        self.has_arrived = True

    def query(self):
        return self.has_arrived


@pytest.fixture
def events(monkeypatch):
    made = []
    made_calls = SimpleNamespace(made=made, calls=[])
    monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(Event(made_calls.calls)) or made[-1])
    return made_calls


@pytest.fixture
def replica(tmp_path):
    return Replica(tmp_path, StatusPage(tmp_path / "marks"))


def test_a_state_counts_when_the_next_is_given_and_is_that_of_its_own_step(replica, events):
    finished = []
    late = LateState(replica, lambda step: finished.append(step) or events.calls.append(f"counts {step}"))
    weight, numbers = torch.zeros(3), [1, 2]
    late.give(1, {"dense": weight, "numbers": numbers})
    assert replica.read() is None
    weight += 7  # the next step
    numbers.append(3)
    late.give(2, {"dense": weight, "numbers": numbers})
    step, tree = replica.read()
    assert (step, finished) == (1, [1])
    assert tree["dense"].tolist() == [0, 0, 0]
    assert tree["numbers"] == [1, 2]
    assert events.calls == ["begin", "wait", "counts 1", "begin"]  # waits for the copy of the step before
    events.made[-1].has_arrived = True
    assert late.settle(0.0) is None
    assert replica.read()[0] == 2
    assert late.settle(0.0) is None  # there is nothing left to do


def test_a_copy_that_never_arrives_is_reported_and_the_state_before_counts(replica, events):
    late = LateState(replica, lambda step: None)
    late.give(1, {"dense": torch.ones(2)})
    late.give(2, {"dense": torch.ones(2)})
    assert late.settle(0.01) == 2
    assert replica.read()[0] == 1


def test_a_main_thread_that_hangs_in_its_copy_does_not_hold_up_the_end(replica, events):
    late = LateState(replica, lambda step: None)
    late.give(1, {"dense": torch.ones(2)})
    reached, let_go = threading.Event(), threading.Event()
    events.made[0].synchronize = lambda: reached.set() or let_go.wait()
    hanging = threading.Thread(target=late.give, args=(2, {"dense": torch.ones(2)}))
    hanging.start()
    reached.wait()
    assert late.settle(0.01) == 1
    let_go.set()
    hanging.join()


class OnGpu:
    """A shard on a GPU that is replicated, so that it is not copied out."""

    def __init__(self):
        self.name, self.replicated, self.columns = "t", True, {}
        self.weights = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.fixture
def publisher(home, events, monkeypatch):
    progress = SimpleNamespace(steps_done=0)
    monkeypatch.setattr(memory, "live_tree", lambda checkpointer: {"step": progress.steps_done})
    segment = home.create("rank0")

    def make(shard):
        return Publisher(
            SimpleNamespace(segment=segment, home=home),
            SimpleNamespace(shards=[shard], newest_step=None),
            progress,
            SimpleNamespace(session_id="session", rank=1, world_size=2, generation=3),
            nn.Identity(),
            [],
        )

    made = []

    def train(shard, steps, **how):
        made[:] = made or [make(shard)]
        for _ in range(steps):
            progress.steps_done += 1
            made[0].publish(**how)
        return made[0], segment.status.step_finished

    monkeypatch.setattr(segment, "holds", lambda shard: False)
    yield train
    made[0].close()


def test_a_worker_with_a_gpu_is_a_step_behind_until_it_ends_by_itself(publisher, events):
    made, finished = publisher(OnGpu(), 3, at_once=False)
    assert finished == 2
    events.made[-1].has_arrived = True
    made.copy_out()
    assert made._segment.status.step_finished == 3
    publisher(OnGpu(), 1, at_once=False)
    assert publisher(OnGpu(), 1)[1] == 5  # at once, as after a save
    events.made[-1].has_arrived = True
    made.copy_out()
    assert made._segment.status.step_finished == 5  # and not 4 again


def test_a_worker_without_a_gpu_is_never_behind(publisher, events):
    shard = make_shard()
    object.__setattr__(shard, "replicated", True)
    assert publisher(shard, 3, at_once=False)[1] == 3
    assert events.made == []
