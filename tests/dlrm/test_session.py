"""The session that saves now and then: what it says when it lets go."""

import logging
from types import SimpleNamespace

import pytest

from cpr.errors import MismatchError
from dlrm.config import CheckpointConfig
from dlrm.session import Checkpoints


class Saved:
    """Stands for a checkpointer with a directory in which `newest_step` is safe, once it has looked."""

    def __init__(self, newest_step: int | None, loads: bool = True) -> None:
        self.steps_done, self.newest_step = 0, None
        self._there, self._loads = newest_step, loads

    def claim(self) -> None:
        pass

    prepare = claim

    def load(self) -> SimpleNamespace:
        if not self._loads:
            raise MismatchError("other tables")
        self.steps_done = self.newest_step = self._there
        newest = SimpleNamespace(created="today", moment="consistent", world_size=1)
        state = SimpleNamespace(sequence=0, step=self._there, newest=newest)
        return SimpleNamespace(state=state, seconds=1.0, same_ranks=True)

    def step(self) -> None:
        self.steps_done += 1

    def close(self, abandon: bool) -> None:
        assert abandon


def open_session(checkpointer: Saved, resume: bool) -> Checkpoints:
    return Checkpoints(checkpointer, CheckpointConfig(every_steps=1000), resume)


def test_a_refused_resume_does_not_say_that_there_is_no_save(caplog):
    session = open_session(Saved(40, loads=False), resume=True)
    with pytest.raises(MismatchError):
        session.restore()
    session.close()
    assert not caplog.records


@pytest.mark.parametrize("resume", [False, True])
def test_who_leaves_before_the_first_step_has_lost_nothing(resume, caplog):
    session = open_session(Saved(40), resume)
    session.restore()
    session.close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        (False, "not saved before leaving at step 2: there is no save"),
        (True, "not saved before leaving at step 42: the newest save is from step 40"),
    ],
)
def test_who_leaves_later_says_what_is_lost(resume, said, caplog):
    session = open_session(Saved(40), resume)
    with caplog.at_level(logging.WARNING, "dlrm"):
        session.restore()
        session.step()
        session.step()
        session.close()
    assert [record.message for record in caplog.records] == [said]
