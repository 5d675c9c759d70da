"""Progress of evaluations in terminals and logs."""

import io
import logging

import pytest

from dlrm.telemetry import progress
from dlrm.telemetry.progress import TrainingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("seconds", "said"), [(0.1, []), (4.0, ["4 of 8 (50 %)", "7 of 8 (88 %)"])])
def test_without_a_terminal_long_evaluations_log_lines(clock, caplog, seconds, said):
    shown = TrainingProgress(100, 8, io.StringIO())
    with caplog.at_level(logging.INFO, "dlrm"):
        for _ in range(2):
            for _ in range(8):
                shown.evaluate()
                clock[0] += seconds
            shown.end_evaluation()
    assert caplog.messages == 2 * [f"evaluation: batch {each}" for each in said]


def test_on_a_terminal_an_evaluation_has_a_bar_that_goes_away():
    terminal = Terminal()
    shown = TrainingProgress(100, 8, terminal)
    shown.evaluate()
    assert "evaluation:" in terminal.getvalue()
    assert "/8 [" in terminal.getvalue()
    shown.end_evaluation()
    assert shown._evaluation is None
    shown.evaluate()
    shown.close()
    assert shown._evaluation is None
