"""Ranks that were started with different configurations are refused; a run ends with its page."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from dlrm.config.schema import CommConfig, Config, DataConfig, DenseConfig
from dlrm.launch.stop_signal import StopRequested
from dlrm.training import run
from dlrm.training.run import NODE_SETTINGS, _settings, check_agreed, check_settings


def test_differing_settings_are_named_with_both_values():
    other = replace(Config(), comm=CommConfig(exchange="ring"), dense=DenseConfig(learning_rate=0.5))
    told = [_settings(Config())] * 2 + [_settings(other)]
    with pytest.raises(ValueError, match=r"rank 2 .* dense.learning_rate=0.5, comm.exchange=ring, and"):
        check_settings(told)


def test_paths_may_differ_between_nodes():
    other = replace(Config(), data=DataConfig(uri="/mnt/criteo", cache_folder="/tmp/cache"))
    check_settings([_settings(Config()), _settings(other)])
    names = {f"{section}.{name}" for section, options in Config().to_dict().items() for name in options}
    assert names >= NODE_SETTINGS


def test_one_rank_agrees_with_itself(world_of_one):
    check_agreed(Config())


@pytest.mark.parametrize(
    ("error", "history", "is_written"),
    [
        (None, "kept", True),
        (StopRequested(15), "kept", True),
        (FloatingPointError("the loss is nan"), "kept", True),
        (RuntimeError("Connection closed by peer"), "kept", False),  # the workers are started again
        (RuntimeError("Connection closed by peer"), None, True),
    ],
)
def test_the_page_is_written_unless_a_restart_waits_for_it(error, history, is_written):
    trainer = MagicMock()
    trainer.train.side_effect = error
    trainer.session.history = history
    with nullcontext() if error is None else pytest.raises(type(error)):
        run._train(trainer)
    telemetry = trainer.telemetry
    names = [call[0] for call in telemetry.method_calls]
    assert names == [*(["finish"] if error is None else ["failed"]), "close", *["write_page"] * is_written]
    assert all(call.args == (history,) for call in telemetry.write_page.call_args_list)


def test_restarted_workers_wait_for_what_cannot_be_reached(monkeypatch, caplog):
    """A new run does not: its user is told at once what to correct."""
    tries = [ConnectionError("no broker answers"), ConnectionError("no broker answers"), None]
    opened = []

    def prepare(*_):
        if error := tries.pop(0):
            raise error
        opened.append(MagicMock(device=torch.device("cpu")))
        return opened[-1]

    recovery = MagicMock(continues=True)
    monkeypatch.setattr(run, "prepare", prepare)
    monkeypatch.setattr(run, "open_recovery", lambda *_: recovery)
    monkeypatch.setattr(run, "RETRY_S", 0.01)
    monkeypatch.setattr(run, "check_agreed", MagicMock(side_effect=StopRequested(15)))
    with pytest.raises(StopRequested):
        run.run(Config(), "tiny", MagicMock())
    assert caplog.text.count("try again, as they trained before: no broker answers") == 2
    opened[0].close.assert_called_once()
    tries += [ConnectionError("no broker answers")]
    recovery.continues = False
    with pytest.raises(ConnectionError):
        run.run(Config(), "tiny", MagicMock())
