"""Tables outside shared memory get there when the worker must go, and count for that moment alone."""

import ctypes
import os
import signal
import time
from types import SimpleNamespace

import pytest
from torch import nn

from cpr.errors import DamagedMemoryError
from cpr.recovery.worker.memory import Publisher
from cpr.resident.copy_out import CopyOut, SigtermHook
from tests.cpr.resident.shards import RUN, assert_same, crash_and_find, make_shard


@pytest.fixture
def segment(home):
    return home.create("rank1")


def copier(segment, shards):
    return CopyOut(segment, shards, lambda complete: segment.seal(**RUN, shards=complete))


def test_copies_survive_the_worker_next_to_what_lives_in_the_segment(home, segment):
    inside, outside = make_shard(segment, fqn="model.host"), make_shard(fqn="model.gpu", fill=7.0)
    copy = copier(segment, [inside, outside])
    assert copy.num_bytes == sum(tensor.nbytes for tensor in outside.columns.values())
    copy.run()
    assert_same([inside, outside], crash_and_find(home, segment).held_shards())


def test_rows_in_a_device_cache_are_brought_back_first(home, segment):
    outside = make_shard()
    object.__setattr__(outside, "flush", lambda: outside.weights.fill_(9.0))
    copier(segment, [outside]).run()
    (held,) = segment.held_shards()
    assert (held.columns["weights"] == 9.0).all()


def test_a_copy_is_of_no_use_after_another_step_began(home, segment):
    inside, outside = make_shard(segment, fqn="model.host"), make_shard(fqn="model.gpu")
    segment.status.update_begun = 4
    copy = copier(segment, [inside, outside])
    copy.run()
    segment.status.update_begun = 5
    assert_same([inside], segment.held_shards())
    outside.weights.fill_(3.0)
    copy.run()
    assert_same([inside, outside], segment.held_shards())


def test_a_step_that_begins_during_the_copy_makes_it_start_over(segment):
    first, second = make_shard(fill=1.0, fqn="model.a"), make_shard(fill=1.0, fqn="model.b")
    steps = iter([2, 3])

    def train_on():  # when the first one has been copied
        if (step := next(steps, None)) is not None:
            segment.status.update_begun = step
            first.weights.fill_(float(step))

    object.__setattr__(second, "flush", train_on)
    copier(segment, [first, second]).run()
    assert_same([first, second], segment.held_shards())


def test_a_copy_that_differs_from_its_digest_is_refused(home, segment):
    copier(segment, [make_shard()]).run()
    path = next(segment.folder.glob("copy-*weights.memory"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedMemoryError, match="differs from its digest"):
        crash_and_find(home, segment).held_shards()


def test_a_death_during_the_copy_leaves_only_what_lives_in_the_segment(segment, monkeypatch):
    inside, outside = make_shard(segment, fqn="model.host"), make_shard(fqn="model.gpu")
    copy = copier(segment, [inside, outside])
    copy.run()

    def die(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(segment, "set_digest", die)
    with pytest.raises(KeyboardInterrupt):
        copy.run()
    assert_same([inside], segment.held_shards())


def _copy_and_hang(pipe, home, hang):
    segment = home.create("rank1")
    copy = copier(segment, [make_shard(fill=6.0)])
    with SigtermHook(copy.run):
        pipe.send("running")
        hang()


def hang_in_python():
    while True:
        time.sleep(60)


def hang_outside_of_python():
    # as in a broken collective: Python's handlers of signals do not run in here
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@pytest.mark.system
@pytest.mark.parametrize("hang", [hang_in_python, hang_outside_of_python])
def test_a_worker_that_is_told_to_stop_saves_its_tables_wherever_it_hangs(home, start, hang):
    child, pipe = start(_copy_and_hang, home, hang)
    assert pipe.recv() == "running"
    time.sleep(0.3)  # it gets there
    os.kill(child.pid, signal.SIGTERM)
    child.join(30)
    # killed by the signal, or ended in place of a main thread that never came back
    assert child.exitcode in {-signal.SIGTERM, 128 + signal.SIGTERM}
    (found,), _ = home.find()
    assert_same([make_shard(fill=6.0)], found.held_shards())


def _leave_slowly(pipe, home):
    shard = make_shard(fill=6.0)

    def flush():  # the copy has begun, and takes its time
        pipe.send("copying")
        time.sleep(0.5)

    object.__setattr__(shard, "flush", flush)
    outliving = Publisher(
        SimpleNamespace(segment=home.create("rank1"), home=home),
        SimpleNamespace(shards=[shard], newest_step=None),
        None,
        SimpleNamespace(session_id="session", rank=1, world_size=2, generation=3),
        nn.Identity(),
        [],
    )
    outliving.copy_out()
    hang_in_python()


@pytest.mark.system
def test_a_worker_that_is_told_to_stop_while_it_copies_ends_with_one_whole_copy(home, start):
    child, pipe = start(_leave_slowly, home)
    assert pipe.recv() == "copying"
    os.kill(child.pid, signal.SIGTERM)
    child.join(20)
    assert child.exitcode in {-signal.SIGTERM, 128 + signal.SIGTERM}
    with pytest.raises(EOFError):  # it was not copied again
        pipe.recv()
    (found,), _ = home.find()
    assert_same([make_shard(fill=6.0)], found.held_shards())


def _handle_signals(pipe):
    signal.signal(signal.SIGTERM, lambda signum, frame: pipe.send("handled"))
    with SigtermHook(lambda: pipe.send("saved")):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        pipe.send("goes on")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.system
def test_a_program_that_handles_the_signal_still_does_so_afterwards(start):
    child, pipe = start(_handle_signals)
    assert [pipe.recv() for _ in range(4)] == ["saved", "handled", "goes on", "handled"]
    child.join(30)
    assert child.exitcode == 0


def _fail_to_copy(pipe):
    with SigtermHook(lambda: 1 / 0):
        os.kill(os.getpid(), signal.SIGTERM)
        hang_in_python()


@pytest.mark.system
def test_a_failing_copy_does_not_keep_the_worker_alive(start):
    child, _ = start(_fail_to_copy)
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


def test_nothing_of_it_stays():
    before = signal.getsignal(signal.SIGTERM)
    with SigtermHook(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
