"""Tables outside shared memory get there when the worker must go, and count for that moment alone."""

import ctypes
import logging
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.recovery.worker.memory import Publisher
from cpr.resident.copy_out import CopyOut, ExitHook
from cpr.resident.home import Home
from tests.cpr.resident.shards import ROWS, RUN, assert_same, crash_and_find, make_shard


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
    with ExitHook(copy.run):
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


def _abort_somewhere(pipe, home, hang):
    segment = home.create("rank1")
    copy = copier(segment, [make_shard(fill=6.0)])
    with ExitHook(copy.run):
        # as NCCL's watchdog does it: in a thread of C that does not know of Python
        libc = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
        hang()


@pytest.mark.system
@pytest.mark.parametrize("hang", [hang_in_python, hang_outside_of_python, os.abort])
def test_a_worker_that_a_thread_of_c_aborts_saves_its_tables_first(home, start, hang):
    child, _ = start(_abort_somewhere, home, hang)
    child.join(30)
    assert child.exitcode == -signal.SIGABRT
    (found,), _ = home.find()
    assert_same([make_shard(fill=6.0)], found.held_shards())


def _abort_without_a_copy(pipe):
    logging.basicConfig(stream=PipeStream(pipe), format="%(message)s", force=True)
    with ExitHook(lambda: 1 / 0, "3.0 GB of tables"):
        os.abort()


class PipeStream:
    def __init__(self, pipe):
        self.pipe = pipe

    def write(self, text):
        self.pipe.send(text)

    def flush(self):
        pass


@pytest.mark.system
def test_a_copy_that_fails_says_what_is_lost_and_the_abort_goes_on(start):
    child, pipe = start(_abort_without_a_copy)
    assert "lost with this worker: 3.0 GB of tables" in pipe.recv()
    child.join(30)
    assert child.exitcode == -signal.SIGABRT


def test_memory_for_copies_is_claimed_at_the_start_by_every_worker(small_root):
    home = Home("run", small_root)
    shards = [make_shard(rows=12_000)]  # 0.8 MB of 2 MB
    for rank in range(2):
        copier(home.create(f"rank{rank}"), shards).reserve()
    with pytest.raises(NotEnoughMemoryError, match="of shared memory are needed"):
        copier(home.create("rank2"), shards).reserve()


class OnGpu:
    """What a copy asks of a tensor on a GPU before it copies."""

    device, dtype, shape, nbytes = torch.device("cuda", 0), torch.float32, (ROWS,), 4 * ROWS

    def data_ptr(self):
        return 0

    def numel(self):
        return ROWS


@pytest.mark.parametrize("error", [0, 2])
def test_memory_that_a_gpu_writes_is_page_locked_until_the_end(segment, monkeypatch, caplog, error):
    calls = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: calls.append(("lock", at, size)) or error,
        cudaHostUnregister=lambda at: calls.append(("unlock", at)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    weights = OnGpu()
    shard = SimpleNamespace(name="t", replicated=False, weights=weights, columns={"weights": weights})
    copy = copier(segment, [shard])
    copy.reserve()
    ((_, at, size),) = calls
    assert size == 4 * ROWS
    copy.close()
    assert calls[1:] == ([] if error else [("unlock", at)])
    assert ("cannot be page-locked (CUDA error 2" in caplog.text) == bool(error)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 lets GPUs go on" in caplog.text


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
    with ExitHook(lambda: pipe.send("saved")):
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
    with ExitHook(lambda: 1 / 0):
        os.kill(os.getpid(), signal.SIGTERM)
        hang_in_python()


@pytest.mark.system
def test_a_failing_copy_does_not_keep_the_worker_alive(start):
    child, _ = start(_fail_to_copy)
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


def test_nothing_of_it_stays():
    before = signal.getsignal(signal.SIGTERM)
    with ExitHook(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
