"""Objections in a sum: heard at once, or when it costs no waiting; between ranks, see test_comm_exchange."""

import pytest
import torch

from dlrm.comm.consistency.error_flags import NUM_FLAGS, ErrorFlags
from dlrm.comm.consistency.preflight import DisagreementError


class Event:
    """Of a GPU that has always finished."""

    recorded = waited = 0

    def record(self):
        Event.recorded += 1

    def synchronize(self):
        Event.waited += 1


def summed(*problems):
    """What ranks with these problems have written, added up."""
    every = torch.full((len(problems), NUM_FLAGS), 9.0)
    for rank, problem in enumerate(problems):
        ErrorFlags(rank, on_gpu=False).write(every[rank], problem)
    return every.sum(0)


def test_nobody_objects():
    ErrorFlags(0, on_gpu=False).read(summed(None, None), None, 1, at_once=True)


@pytest.mark.parametrize(
    ("problems", "who"),
    [((None, None, KeyError()), "rank 2 cannot"), ((KeyError(), None, ValueError()), "2 ranks cannot")],
)
def test_who_objects_is_named(problems, who):
    with pytest.raises(
        DisagreementError, match=f"{who} take part in exchange 1,234: .* Nothing of it counts"
    ):
        ErrorFlags(1, on_gpu=False).read(summed(*problems), None, 1234, at_once=False)


def test_who_has_a_problem_raises_that(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    problem = KeyError("mine")
    for on_gpu in (False, True):
        with pytest.raises(KeyError, match="mine"):
            ErrorFlags(1, on_gpu).read(summed(None, problem), problem, 1, at_once=False)


def test_on_a_gpu_it_is_read_when_it_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    objections, places = ErrorFlags(0, on_gpu=True), summed(None, KeyError())
    with pytest.raises(DisagreementError, match="rank 1 cannot"):  # the caller waits anyway
        objections.read(places, None, 5, at_once=True)
    objections.read_late()
    assert Event.recorded == 0
    objections.read(places, None, 5, at_once=False)
    assert (Event.recorded, Event.waited) == (1, 0)
    with pytest.raises(
        DisagreementError, match=r"rank 1 could not .* exchange 5, .* go back to a saved state"
    ):
        objections.read_late()
    assert Event.waited == 1
    objections.read_late()  # it is told once
