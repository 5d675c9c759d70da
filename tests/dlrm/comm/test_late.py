"""Scalars are read at once on the CPU, and a step later on a GPU, for which events stand in."""

import pytest
import torch

from dlrm.comm.late import LateScalars


class Event:
    """Says whether work that the host did not wait for was read."""

    waited = 0

    def record(self):
        self.is_recorded = True

    def synchronize(self):
        assert self.is_recorded
        Event.waited += 1


@pytest.fixture(autouse=True)
def event(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waited", 0)


def test_on_the_cpu_scalars_are_read_at_once():
    late = LateScalars(on_gpu=False)
    assert late.give(torch.tensor([1.0, 2.0]), "first") == ([1.0, 2.0], "first")
    assert late.take() is None
    assert Event.waited == 0


def test_on_a_gpu_each_step_reads_the_scalars_of_the_one_before():
    late = LateScalars(on_gpu=True)
    assert late.give(torch.tensor([1.0]), "first") is None
    assert Event.waited == 0
    assert late.give(torch.tensor([2.0]), "second") == ([1.0], "first")
    assert Event.waited == 1, "once a step, for the step before"
    assert late.take() == ([2.0], "second")
    assert late.take() is None
