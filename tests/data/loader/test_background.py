"""The background thread ends when it should, and nobody ever hangs because of it."""

import gc
import signal
import subprocess
import sys
import threading
import time

import pytest

from data.loader import DataLoader, FeedClosedError, LoaderConfig
from data.loader.background import Feed

CONFIG = LoaderConfig(batch_size=4, window_batches=2, prefetch=1)


class StuckSource:
    """A storage that does not answer until `released`."""

    def __init__(self):
        self.asked, self.released = threading.Event(), threading.Event()

    def read(self, part, row_group):
        self.asked.set()
        self.released.wait(30)
        raise OSError("released")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_dataset):
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder)
    return str(folder)


@pytest.fixture
def stuck(folder, monkeypatch):
    monkeypatch.setattr("data.loader.background.CLOSE_S", 0.05)  # it waits for all of it
    source = StuckSource()
    yield source
    source.released.set()


def alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("data-loader")]


def test_items_come_in_order_with_bounded_prefetching():
    made = []

    def produce(closed):
        for item in range(100):
            made.append(item)
            yield item

    feed = Feed(produce, ahead=3, name="feed")
    feed.start()
    got = [next(feed) for _ in range(5)]
    deadline = time.monotonic() + 10
    while len(made) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    feed.close()
    assert got == [0, 1, 2, 3, 4]
    assert made == list(range(8))


def test_an_error_of_the_thread_comes_after_the_items_before_it():
    error = KeyError("mine")

    def produce(closed):
        yield 1
        raise error

    feed = Feed(produce, ahead=5, name="feed")
    feed.start()
    assert next(feed) == 1
    with pytest.raises(KeyError) as caught:
        next(feed)
    feed.close()
    assert caught.value is error


def test_closing_wakes_up_a_waiting_loop(folder, stuck):
    loader = DataLoader(folder, CONFIG, source=stuck)
    closer = threading.Thread(target=lambda: (stuck.asked.wait(30), loader.close()))
    closer.start()
    with pytest.raises(FeedClosedError):
        next(iter(loader))
    assert not stuck.released.is_set()
    stuck.released.set()
    closer.join()


@pytest.mark.parametrize("close_in_handler", [False, True])
def test_a_signal_interrupts_a_waiting_loop(folder, stuck, close_in_handler):
    """Ctrl-C does, and a handler may close the loader."""
    loader = DataLoader(folder, CONFIG, source=stuck)
    before = signal.getsignal(signal.SIGINT)
    if close_in_handler:
        signal.signal(signal.SIGINT, lambda *_: loader.close())
    main = threading.main_thread().ident
    killer = threading.Thread(target=lambda: (stuck.asked.wait(30), signal.pthread_kill(main, signal.SIGINT)))

    def wait():
        killer.start()  # not before: the signal may come at once, and would end all tests of this process
        next(iter(loader))

    try:
        with pytest.raises(FeedClosedError if close_in_handler else KeyboardInterrupt):
            wait()
    finally:
        killer.join()
        signal.signal(signal.SIGINT, before)
    assert not stuck.released.is_set()


def test_iterator_of_a_closed_loader_raises(folder):
    loader = DataLoader(folder, CONFIG)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.close()
    with pytest.raises(FeedClosedError):
        next(batches)
    assert loader.state_dict() == state


@pytest.mark.parametrize("how", ["drop", "close", "exhaust", "break", "new"])
def test_the_thread_ends(folder, how):
    loader = DataLoader(folder, CONFIG)
    batches = iter(loader)
    next(batches)
    (thread,) = alive()
    if how == "drop":
        del batches, loader
        gc.collect()
    elif how == "close":
        loader.close()
    elif how == "exhaust":
        list(batches)
    elif how == "break":
        batches.close()
    else:
        next(iter(loader))
    thread.join(10)
    assert not thread.is_alive()


ENDINGS = ("", "raise SystemExit(0)", "loader.close()")


@pytest.mark.system
@pytest.mark.timeout(60)
def test_the_interpreter_exits_in_the_middle_of_an_epoch(folder):
    """That of a fork, for each ending, as importing takes most of the time."""
    script = f"""
import os, signal
from data.loader import DataLoader, LoaderConfig
for ending in {ENDINGS!r}:
    if os.fork() == 0:
        signal.alarm(30)
        loader = DataLoader({folder!r}, LoaderConfig(batch_size=4, window_batches=2))
        batches = iter(loader)
        next(batches)
        exec(ending)
        break
    assert os.wait()[1] == 0, ending
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr.decode()
