"""Exchanges are timed on a GPU, with stand-ins for its events, and on the CPU."""

import pytest
import torch

from dlrm.comm import stats
from dlrm.comm.stats import Tally


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
        Event.waited_for_s = self.at_s

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_intervals_add_up_until_they_are_taken_and_failed_ones_do_not_count(device, monkeypatch):
    monkeypatch.setattr(stats, "_event", Event)
    monkeypatch.setattr(stats.time, "perf_counter", lambda: Event().record() or Event.now_s)
    tally = Tally(torch.device(device))
    for failures in range(3):
        for _ in range(1 + failures):
            tally.start()  # and work raises, but for the last time
        tally.stop()
    tally.start()
    assert tally.take_seconds() == 3.0
    assert tally.take_seconds() == 0.0
    tally.exchange(num_kept=1, num_values=2, sent_bytes=8)
    assert tally.take("ring").seconds == 3.0
    assert tally.take("ring") is None


def test_seconds_that_are_taken_late_wait_for_the_interval_before_the_newest_alone(monkeypatch):
    monkeypatch.setattr(stats, "_event", Event)
    tally = Tally(torch.device("cuda"))
    taken = []
    for _ in range(3):
        tally.start()
        tally.stop()
        newest_s = Event.now_s
        taken.append(tally.take_seconds(late=True))
    assert taken == [0, 1, 1]
    assert Event.waited_for_s == newest_s - 2
    assert tally.take_seconds() == 1  # none is lost
