"""The savers of the checkpointing experiment on one worker, and their measurement."""

import mmap
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from cpr.shards import find_shards
from dlrm.launch.device import Ranks
from dlrm.training.build import start_process_group
from experiments.checkpointing.baselines import (
    DcpAsyncSave,
    DcpSave,
    RawWrite,
    TorchSave,
    folder_bytes,
    local_tensors,
)
from experiments.checkpointing.bench import Bench, SaveWatch, resident_bytes
from experiments.checkpointing.job import TrainingJob, start_training
from experiments.checkpointing.ours import OurRowSave, OurSave, checkpointer_at, random_rows, shard_bytes

pytestmark = pytest.mark.system

JOB = TrainingJob(rows=1000, global_batch_size=32, steps_before=2)
CEILING_BYTES = 96 * 2**20


@pytest.fixture(scope="module")
def training():
    start_process_group(Ranks(0, 0, 1), torch.device("cpu"))
    training = start_training(JOB, Ranks(0, 0, 1))
    training.timed_steps(3)
    yield training
    dist.destroy_process_group()


def test_torch_save_writes_all_tensors(training, tmp_path):
    saver = TorchSave(tmp_path / "saved", training.model)
    assert not saver.committed
    saver.begin()
    assert saver.committed
    assert saver.idle
    assert saver.finish() == folder_bytes(tmp_path)
    loaded = torch.load(tmp_path / "saved" / "rank0.pt")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in local_tensors(training.model).items())


def test_raw_writing_writes_the_bytes_of_every_row(training, tmp_path):
    saver = RawWrite(tmp_path / "saved", training.model)
    saver.begin()
    shards = find_shards(training.model)
    assert saver.finish() == shard_bytes(shards) == 26 * 1000 * 65 * 4
    written = (tmp_path / "saved" / "rank0.bin").read_bytes()
    last = shards[-1].columns["sum"].detach().numpy().tobytes()
    assert written.startswith(shards[0].weights.detach().numpy().tobytes())
    assert written.endswith(last)


def test_async_save_writes_the_values_at_its_start(training, tmp_path):
    saver = DcpAsyncSave(tmp_path / "saved", training.model)
    expected = {name: tensor.clone() for name, tensor in local_tensors(training.model).items()}
    saver.begin()
    training.timed_steps(3)
    assert saver.finish() > 26 * 1000 * 65 * 4
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(loaded, checkpoint_id=tmp_path / "saved")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_our_save_is_committed_when_its_manifest_exists(training, tmp_path):
    checkpointer = checkpointer_at(tmp_path / "saved", training.model, CEILING_BYTES)
    with checkpointer:
        first = OurSave(tmp_path / "saved", checkpointer, "consistent", waits=True)
        assert not first.committed
        first.begin()
        assert first.committed
        assert (tmp_path / "saved" / "saves" / "00000000-1" / "manifest.json").exists()
        whole = first.finish()
        rolling = OurSave(tmp_path / "saved", checkpointer, "rolling")
        rolling.begin()
        assert not rolling.committed  # nothing was copied yet; the manifest is that of the older save
        while not rolling.committed:
            rolling.step()
            time.sleep(0.01)
        rows = OurRowSave(tmp_path / "saved", checkpointer, random_rows(checkpointer.shards, 1 / 8, seed=1))
        rows.begin()
        num_bytes = rows.finish()
        assert rows.idle
        assert whole - num_bytes > 0.8 * 26 * 1000 * 65 * 4


def test_random_rows_are_the_requested_share_of_every_shard(training):
    shards = find_shards(training.model)
    rows = random_rows(shards, 1 / 8, seed=3)
    assert rows.keys() == {shard.name for shard in shards}
    for ids in rows.values():
        assert ids.numel() == 125
        assert bool((ids[1:] > ids[:-1]).all())
        assert int(ids[0]) >= 0
        assert int(ids[-1]) < 1000
    first, second, *_ = rows.values()
    assert not torch.equal(first, second)


class MadeUp:
    """A saver that waits in each call, and is committed and idle after given numbers of steps."""

    held_up_s = 0.0

    def __init__(self, commits_after, idle_after, wait_s):
        self._commits_after, self._idle_after, self._wait_s = commits_after, idle_after, wait_s
        self.steps = None

    def begin(self):
        time.sleep(self._wait_s)
        self.steps = 0

    def step(self):
        time.sleep(self._wait_s)
        self.steps += 1

    @property
    def committed(self):
        return self.steps is not None and self.steps >= self._commits_after

    @property
    def idle(self):
        return self.steps is not None and self.steps >= self._idle_after

    def finish(self):
        return 17


def test_measured_times_and_steps_of_a_save(training, tmp_path):
    bench = Bench(JOB, training, tmp_path, rank=0)
    measured = bench.measure("made up", lambda: MadeUp(commits_after=3, idle_after=6, wait_s=0.05))
    assert measured["steps"] == 4  # the step after the commit sees it
    assert measured["bytes"] == 17
    assert 5 * 0.05 <= measured["blocked_s"] < measured["wall_s"]
    assert 4 * 0.05 <= measured["committed_s"] < measured["wall_s"]
    assert measured["lost_s"] == pytest.approx(measured["wall_s"] - 4 * measured["undisturbed_step_s"])
    assert measured["after_s"] >= 3 * 0.05
    assert measured["lost_after_s"] == pytest.approx(measured["after_s"] - 3 * measured["undisturbed_step_s"])


def test_waiting_within_a_step_counts_and_a_blocking_save_has_no_steps(training, tmp_path):
    class Holding(MadeUp):
        """Reports that the first step after its start was blocked for 100 s."""

        asked = 0

        @property
        def held_up_s(self):
            self.asked += 1
            return 100.0 if self.asked > 1 else 0.0

    bench = Bench(JOB, training, tmp_path, rank=0)
    measured = bench.measure("made up", lambda: Holding(commits_after=2, idle_after=2, wait_s=0.05))
    assert 100 + 4 * 0.05 <= measured["blocked_s"] < 100 + measured["wall_s"]
    measured = bench.measure("made up", lambda: MadeUp(commits_after=0, idle_after=0, wait_s=0.05))
    assert measured["steps"] == 0
    assert measured["committed_s"] == measured["blocked_s"] >= 0.05


def test_watch_measures_peak_memory_and_commit_time():
    saver = MadeUp(commits_after=1, idle_after=1, wait_s=0)
    before = resident_bytes()
    with SaveWatch(saver) as watch:
        saver.begin()
        with mmap.mmap(-1, 64 * 2**20) as taken:  # memory of the allocator may be resident before
            taken[:: mmap.PAGESIZE] = b"x" * (len(taken) // mmap.PAGESIZE)
            time.sleep(0.1)
        saver.step()
        time.sleep(0.1)
    assert watch.peak_bytes - before > 50 * 2**20
    assert watch.committed_at > 0


def test_load_of_other_values_raises(training, tmp_path):
    bench = Bench(JOB, training, tmp_path, rank=0)
    saver = DcpSave(tmp_path / "dcp save", training.model)
    bench.measure("dcp save", lambda: saver)
    loads = bench._loads("dcp", saver.load, "dcp save")
    assert sorted(loads) == ["dcp cold", "dcp warm"]
    with pytest.raises(RuntimeError, match="did not load what it had saved"):
        bench._loads("dcp", lambda: None, "dcp save")
