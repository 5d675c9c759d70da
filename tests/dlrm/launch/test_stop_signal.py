"""Signals stop a process at once, after a step, or by force."""

# ruff: noqa: PT012  # where in a block it is raised is what these tests are about

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta

import pytest

from data.loader.background import Feed
from dlrm.launch.stop_signal import SIGNALS, StopRequested, StopSignal

SOON = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def signals_given_back():
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", SIGNALS, ids=str)
def test_a_signal_outside_a_step_raises_at_once(signum):
    with pytest.raises(StopRequested) as caught, StopSignal() as stop:
        with suppress(Exception):  # it is no error
            send(signum)
        pytest.fail("went on")
    assert stop.requested
    assert stop.signum == caught.value.signum == signum
    assert caught.value.exit_code == 128 + signum
    assert str(caught.value) == f"stopped by {signum.name}"


@pytest.mark.parametrize("signum", SIGNALS, ids=str)
def test_a_signal_inside_a_step_is_recorded(signum):
    with StopSignal(grace=SOON) as stop:
        assert not stop.requested
        with stop.deferred():
            send(signum)
            time.sleep(0.05)
            assert stop.requested
        with pytest.raises(StopRequested) as caught:
            stop.leave()
    assert caught.value.signum == signum


def test_a_step_that_does_not_end_is_interrupted_after_the_grace():
    began = time.monotonic()
    with pytest.raises(StopRequested, match="SIGINT"), StopSignal(grace=SOON) as stop, stop.deferred():
        send(signal.SIGINT)
        while time.monotonic() - began < 30:
            time.sleep(0.01)
    assert time.monotonic() - began >= SOON.total_seconds()


def test_sigterm_may_come_twice_before_the_step_ends():
    with StopSignal(grace=LONG) as stop, stop.deferred():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.requested


def test_a_step_that_does_not_end_is_interrupted_after_sigterm_came_twice():
    with pytest.raises(StopRequested, match="SIGTERM"), StopSignal(grace=SOON) as stop, stop.deferred():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        time.sleep(30)


def test_a_second_ctrl_c_raises_at_once():
    with pytest.raises(StopRequested), StopSignal(grace=LONG) as stop, stop.deferred():
        send(signal.SIGINT)
        send(signal.SIGINT)
        time.sleep(30)


def test_extended_lets_a_save_complete_after_sigterm():
    with StopSignal(grace=SOON) as stop:
        with stop.extended(LONG):
            send(signal.SIGTERM)
            time.sleep(2 * SOON.total_seconds())
            send(signal.SIGTERM)
        assert stop.requested


def test_extended_ends_after_its_time():
    began = time.monotonic()
    with pytest.raises(StopRequested, match="SIGTERM"), StopSignal(grace=SOON) as stop, stop.extended(SOON):
        send(signal.SIGTERM)
        time.sleep(30)
    assert time.monotonic() - began >= 2 * SOON.total_seconds()


def test_ctrl_c_does_not_wait_for_extended():
    with pytest.raises(StopRequested, match="SIGINT"), StopSignal(grace=LONG) as stop, stop.extended(LONG):
        send(signal.SIGINT)
        pytest.fail("went on")


def test_an_earlier_ctrl_c_does_not_wait_for_extended():
    with pytest.raises(StopRequested, match="SIGINT"), StopSignal(grace=SOON) as stop:
        with stop.deferred():
            send(signal.SIGINT)
        with stop.extended(LONG):
            time.sleep(30)


def test_a_blocked_loader_is_interrupted():
    def never(closed):
        while not closed():
            time.sleep(0.01)
        return iter(())

    feed = Feed(never, ahead=1, name="blocked")
    feed.start()
    try:
        with pytest.raises(StopRequested), StopSignal():
            killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"])
            next(feed)
    finally:
        feed.close()
        killer.wait()


STUCK = """
import ctypes
import threading
from datetime import timedelta
from dlrm.launch.stop_signal import StopSignal

pthread = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
pthread.pthread_mutex_lock(mutex)
with StopSignal(grace=timedelta(seconds=0.2), tidy_up=timedelta(seconds=0.2)):
    threading.Timer(0.5, print, ["ready"], {"flush": True}).start()  # when this thread is long stuck
    pthread.pthread_mutex_lock(mutex)  # never returns, and no signal interrupts it
"""


def test_hanging_native_code_is_ended_by_force():
    """A collective whose peer hangs, storage that hangs: Python runs no signal handler there."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert said == "stopped by SIGTERM, by force: a call did not return\n"
