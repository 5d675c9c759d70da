"""The session with periodic checkpoints: warnings and failing saves."""

import logging
from types import SimpleNamespace

import pytest

from cpr import Changes
from cpr.checkpoint.collectives import Alone
from cpr.errors import MismatchError, SaveFailedError
from dlrm.config.schema import CheckpointConfig
from dlrm.fault_tolerance.session import Checkpoints


class Saved:
    """Stands for a checkpointer with a directory in which `newest_step` is safe, once it has looked."""

    def __init__(self, newest_step: int | None, loads: bool = True) -> None:
        self.steps_done, self.newest_step, self.agreement = 0, None, Alone()
        self.saved_moment = None
        self.ownership = SimpleNamespace(last_owner=lambda: None)
        self._there, self._loads = newest_step, loads

    def claim(self) -> None:
        pass

    prepare = newest_state = claim

    def load(self, changes: Changes) -> SimpleNamespace:
        if not self._loads:
            raise MismatchError("other tables")
        self.steps_done = self.newest_step = self._there
        newest = SimpleNamespace(created="today", moment="consistent", world_size=1)
        state = SimpleNamespace(sequence=0, step=self._there, newest=newest)
        return SimpleNamespace(state=state, seconds=1.0, same_ranks=True)

    def register(self, name: str, state: object, optional: bool) -> None:
        assert optional, "older saves have none"

    def step(self) -> None:
        self.steps_done += 1

    def close(self, abandon: bool) -> None:
        assert abandon


def open_session(checkpointer: Saved, resume: bool) -> Checkpoints:
    return Checkpoints(checkpointer, CheckpointConfig(every_steps=1000), resume, lambda checkpointer: None)


def test_a_refused_resume_does_not_warn_of_unsaved_steps(caplog):
    session = open_session(Saved(40, loads=False), resume=True)
    with pytest.raises(MismatchError):
        session.restore()
    session.close()
    assert not caplog.records


@pytest.mark.parametrize("resume", [False, True])
def test_leaving_before_the_first_step_warns_of_nothing(resume, caplog):
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
def test_leaving_later_warns_of_unsaved_steps(resume, said, caplog):
    session = open_session(Saved(40), resume)
    with caplog.at_level(logging.WARNING, "dlrm"):
        session.restore()
        session.step(8)
        session.step(8)
        session.close()
    assert [record.message for record in caplog.records] == [said]


class Full(Saved):
    """Whose disk is full."""

    def save(self, moment: str, timeout_s: float | None = None) -> None:
        raise SaveFailedError("the disk is full")


def train(config: CheckpointConfig, steps: int) -> None:
    session = Checkpoints(Full(None), config, False, lambda checkpointer: None)
    session.restore()
    for _ in range(steps):
        session.step(8)


def test_failing_saves_end_training_only_after_the_limit(caplog, monkeypatch):
    monkeypatch.setattr("cpr.saving.periodic.FIRST_PAUSE_S", 0.0)
    train(CheckpointConfig(every_steps=2), 100)
    assert caplog.text.count("the disk is full. Training continues") > 3
    with pytest.raises(SaveFailedError, match=r"the disk is full\. Saves have failed for .* is 1 ms"):
        train(CheckpointConfig(every_steps=2, give_up_after="1ms"), 10**6)


def test_give_up_after_is_a_duration():
    assert CheckpointConfig(give_up_after="1h30m").give_up_after_s == 5400
    for wrong in ("soon", "0s", "90"):
        with pytest.raises(ValueError, match=r"checkpoint\.give_up_after"):
            CheckpointConfig(give_up_after=wrong)
