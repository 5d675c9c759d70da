"""Waiting for collectives is counted, in the thread that asks, and nowhere else."""

from threading import Thread
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Work

from dlrm.batching.waits import timed_waits

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture
def slow_wait(monkeypatch):
    wait = Work.wait
    monkeypatch.setattr(Work, "wait", lambda work, *args: (sleep(0.05), wait(work, *args))[1])
    return Work.wait


def test_waits_of_this_thread_are_counted(slow_wait):
    with timed_waits() as waited_s:
        assert waited_s() == 0
        dist.all_reduce(torch.ones(3))
        assert (first := waited_s()) >= 0.05
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert waited_s() == first
        work.wait()
        assert waited_s() >= first + 0.05
        before, other = waited_s(), Thread(target=dist.all_reduce, args=[torch.ones(3)])
        other.start()
        other.join()
        assert waited_s() == before
    assert Work.wait is slow_wait


def test_an_error_while_waiting_is_raised_and_the_method_put_back(monkeypatch):
    def fail(work):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Work, "wait", fail)
    with pytest.raises(RuntimeError, match="closed by peer"), timed_waits():
        dist.all_reduce(torch.ones(3))
    assert Work.wait is fail
