"""The device timer on a GPU, with stand-ins for its events, and on the CPU."""

import pytest
import torch

from dlrm.comm.stats import timer as module
from dlrm.comm.stats.timer import DeviceTimer


class Event:
    """Is recorded a second after the one before."""

    now_s = 0.0

    def __init__(self):
        self.at_s = None

    def record(self):
        Event.now_s += 1
        self.at_s = Event.now_s

    def synchronize(self):
        assert self.at_s is not None, "the event was not recorded"

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(module, "_event", Event)
    return DeviceTimer(torch.device("cuda"))


def test_intervals_add_up_until_they_are_taken(on_gpu):
    for _ in range(3):
        on_gpu.start()
        on_gpu.stop()
    assert on_gpu.take() == 3.0
    assert on_gpu.take() == 0.0


def test_an_interval_in_which_work_failed_does_not_count(on_gpu):
    on_gpu.start()
    on_gpu.stop()
    on_gpu.start()  # and the work raises
    assert on_gpu.take() == 1.0
    on_gpu.start()
    on_gpu.stop()
    assert on_gpu.take() == 1.0


def test_intervals_on_the_cpu():
    watch = DeviceTimer(torch.device("cpu"))
    watch.start()
    watch.start()
    watch.stop()
    assert 0 < watch.take() < 60
    assert watch.take() == 0
