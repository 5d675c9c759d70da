"""Exit codes and messages of a training process."""

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from cpr import errors
from dlrm.launch import process
from dlrm.launch.process import exit_code_of


@pytest.fixture
def slept(monkeypatch):
    """How long the process waited for others to speak first."""
    pauses = []
    monkeypatch.setattr(process.time, "sleep", pauses.append)
    return pauses


def fail_with(error):
    def job(stop):
        raise error

    return job


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("do this"), 2),
        (process.IncompatiblePackagesError("do this"), 2),
        (errors.MismatchError("do this"), 2),
        (errors.LockedError("do this"), 2),
        (errors.SaveFailedError("do this"), 1),
        (errors.NoUsableStateError("do this"), 1),
        (errors.CheckpointError("do this"), 1),
        (OSError("do this"), 1),
        (OSError(errno.ENOSPC, "do this"), 2),
        (OSError(errno.EIO, "do this"), 1),
        (FloatingPointError("do this"), 1),
        (errors.RunStoppedError("do this"), 1),
        (errors.NotEnoughMemoryError("do this"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mistakes_and_failures_are_one_line(error, code, capsys, slept):
    assert exit_code_of("prog", fail_with(error)) == code
    assert capsys.readouterr() == ("", f"prog: {error}\n")
    assert not slept


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**62, dtype=torch.int8),
        lambda: torch.empty(2**62, 4),
        lambda: bytearray(2**62),
    ],
)
def test_too_little_memory_is_one_line(allocate, capsys, slept):
    assert exit_code_of("prog", lambda stop: allocate()) == 1
    out, error = capsys.readouterr()
    assert error.startswith("prog: not enough memory (")
    assert "Lower data.global_batch_size" in error
    assert (out, error.count("\n")) == ("", 1)


def test_the_process_module_does_not_import_torch():
    program = "import sys, dlrm.launch.process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=30, check=True)


def test_other_ranks_let_rank_0_speak_first(monkeypatch, capsys, slept):
    monkeypatch.setenv("RANK", "3")
    assert exit_code_of("prog", fail_with(ValueError("found everywhere"))) == 2
    assert slept == [process.WAIT_WITHOUT_GROUP_S]
    assert capsys.readouterr().err == "prog: found everywhere\n"


def test_with_a_process_group_other_ranks_report_sooner(world_of_one, monkeypatch, capsys, slept):
    monkeypatch.setenv("RANK", "3")
    assert exit_code_of("prog", fail_with(ValueError("found here"))) == 2
    assert slept == [process.WAIT_S]
    assert capsys.readouterr().err == "prog: found here\n"


@pytest.mark.parametrize(("message", "waits"), [("connection closed by peer", True), ("bug", False)])
def test_errors_of_a_peer_wait_before_they_are_raised(message, waits, monkeypatch, slept):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=message):
        exit_code_of("prog", fail_with(RuntimeError(message)))
    assert slept == [process.WAIT_S] * waits


@pytest.mark.parametrize(("rank", "said"), [("0", "prog: stopped by SIGTERM\n"), ("1", "")])
def test_a_stop_is_reported_by_rank_0(rank, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    assert exit_code_of("prog", lambda stop: os.kill(os.getpid(), signal.SIGTERM)) == 143
    assert capsys.readouterr().err == said


def test_a_broken_collective_during_a_stop_is_no_error(capsys):
    def job(stop):
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("connection closed by peer")

    assert exit_code_of("prog", job) == 130
    assert capsys.readouterr().err == "prog: stopped by SIGINT\n"


def test_a_stopped_process_waits_for_no_thread():
    """As long as storage hangs, so does the thread that reads it, and the interpreter's exit with it."""
    program = (
        "import atexit, sys, time; from dlrm.launch.process import leave;"
        "atexit.register(time.sleep, 60); print('last words'); leave(int(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "143"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (143, "last words\n")
