"""Error flags in a sum are read at once, or later on a GPU; between ranks, see tests/system/comm."""

import pytest
import torch

from dlrm.comm.consistency import NUM_FLAGS, DisagreementError, ErrorFlags


class Event:
    """A stand-in for an event of a GPU that has finished."""

    recorded = waited = 0

    def record(self):
        Event.recorded += 1

    def synchronize(self):
        Event.waited += 1


def summed(*problems):
    """The summed flags of ranks with these problems."""
    every = torch.full((len(problems), NUM_FLAGS), 9.0)
    for rank, problem in enumerate(problems):
        ErrorFlags(rank, on_gpu=False).write(every[rank], problem)
    return every.sum(0)


@pytest.mark.parametrize(
    ("problems", "who"),
    [((None, None, KeyError()), "rank 2 cannot"), ((KeyError(), None, ValueError()), "2 ranks cannot")],
)
def test_failed_ranks_are_named(problems, who):
    ErrorFlags(0, on_gpu=False).read(summed(None, None), None, 1)  # nothing to report
    with pytest.raises(
        DisagreementError, match=f"{who} take part in exchange 1,234: .* Nothing of it counts"
    ):
        ErrorFlags(1, on_gpu=False).read(summed(*problems), None, 1234)


def test_a_failed_rank_raises_its_own_problem(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    problem = KeyError("mine")
    for on_gpu in (False, True):
        with pytest.raises(KeyError, match="mine"):
            ErrorFlags(1, on_gpu).read(summed(None, problem), problem, 1)


def test_on_a_gpu_flags_are_read_late(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    flags, places = ErrorFlags(0, on_gpu=True), summed(None, KeyError())
    flags.read_late()
    assert Event.recorded == 0
    flags.read(places, None, 5)
    assert (Event.recorded, Event.waited) == (1, 0)
    with pytest.raises(
        DisagreementError, match=r"rank 1 could not .* exchange 5, .* go back to a saved state"
    ):
        flags.read_late()
    assert Event.waited == 1
    flags.read_late()  # it is reported once
