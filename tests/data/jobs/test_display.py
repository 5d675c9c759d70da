"""What somebody who waits is shown, on a terminal and elsewhere."""

import io
from types import SimpleNamespace

import pytest

from data.jobs import display
from data.jobs.display import QUIET_INTERVAL_S, Meter, ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the display sees; a test turns it on by hand."""
    now_s = [100.0]
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_output_without_a_terminal_has_occasional_lines(clock):
    stream = io.StringIO()
    shown = ProgressDisplay("prepare", total_bytes=1000, done_bytes=200, stream=stream)
    clock[0] += QUIET_INTERVAL_S - 1
    shown.update(300, 29_000)
    assert stream.getvalue() == ""
    clock[0] += 1
    shown.update(400, 1000)
    # 200 bytes took 30 s, so the other 600 take 90 s
    assert stream.getvalue() == "prepare: 40%, 1,000 rows/s, about 90 s left\n"
    clock[0] += QUIET_INTERVAL_S - 1
    shown.update(500, 0)
    assert stream.getvalue().count("\n") == 1


def test_closing_prints_a_summary(clock):
    stream = io.StringIO()
    shown = ProgressDisplay("prepare", total_bytes=1000, done_bytes=0, stream=stream)
    clock[0] += 4
    shown.update(1000, 6000)
    shown.close()
    assert stream.getvalue() == "prepare: 6,000 rows in 4.0 s, 1,500 rows/s\n"


def test_closing_prints_nothing_if_nothing_was_done(clock):
    stream = io.StringIO()
    ProgressDisplay("prepare", total_bytes=1000, done_bytes=1000, stream=stream).close()
    assert stream.getvalue() == ""


def test_a_task_that_runs_again_is_counted_once(clock, capsys):
    with Meter("read", num_tasks=2, total=300, done=100) as meter:
        for position, reached in [(0, (50, 5)), (1, (40, 4)), (-1, None), (0, (20, 2)), (0, (100, 10))]:
            assert meter(position, reached)
        clock[0] += QUIET_INTERVAL_S
        meter(1, (100, 10))
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("read: 100%, ")
    assert shown[1].startswith("read: 20 rows in ")
