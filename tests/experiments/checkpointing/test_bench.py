"""Savers on one worker: what they write can be read back, and what is measured of them is what they did."""

import mmap
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from cpr.shards import find_shards
from dlrm.launch.device import Ranks
from dlrm.training.build import start_process_group
from experiments.checkpointing.baselines import DcpAsyncSave, DcpSave, RawWrite, TorchSave, local_tensors
from experiments.checkpointing.bench import Bench
from experiments.checkpointing.files import folder_bytes, forget_cached
from experiments.checkpointing.job import Job, start_training
from experiments.checkpointing.ours import OurRowSave, OurSave, checkpointer_at, random_rows, shard_bytes
from experiments.checkpointing.watch import Watch, resident_bytes

pytestmark = pytest.mark.system

JOB = Job(rows=1000, global_batch_size=32, steps_before=2)
CEILING_BYTES = 96 * 2**20


@pytest.fixture(scope="module")
def training():
    start_process_group(Ranks(0, 0, 1), torch.device("cpu"))
    training = start_training(JOB, Ranks(0, 0, 1))
    training.timed_steps(3)
    yield training
    dist.destroy_process_group()


def test_training_trains(training):
    before = {name: tensor.clone() for name, tensor in local_tensors(training.model).items()}
    assert len(training.timed_steps(2)) == 2
    after = local_tensors(training.model)
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert sum("/weights" in name for name in changed) == 26
    assert any("/" not in name for name in changed)  # the network


def test_a_flag_counts_when_all_ranks_have_set_it(training):
    assert training.step(flag=True)
    assert not training.step(flag=False)


def test_the_local_tensors_are_all_tables_with_their_state_and_the_network(training):
    tensors = local_tensors(training.model)
    for name in ("weights", "sum"):
        assert sum(key.endswith(f"/{name}") for key in tensors) == 26
    network = sum(
        parameter.numel() for name, parameter in training.model.named_parameters() if "_bags" not in name
    )
    assert sum(tensor.numel() for tensor in tensors.values()) == 26 * 1000 * 65 + network


def test_torch_save_writes_all(training, tmp_path):
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


def test_async_save_saves_the_moment_of_its_beginning(training, tmp_path):
    saver = DcpAsyncSave(tmp_path / "saved", training.model)
    expected = {name: tensor.clone() for name, tensor in local_tensors(training.model).items()}
    saver.begin()
    training.timed_steps(3)
    assert saver.finish() > 26 * 1000 * 65 * 4
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(loaded, checkpoint_id=tmp_path / "saved")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("cold", [True, False])
def test_dcp_loads_into_the_live_model(training, tmp_path, cold):
    saver = DcpSave(tmp_path / "saved", training.model)
    saver.begin()
    expected = {name: tensor.clone() for name, tensor in local_tensors(training.model).items()}
    training.timed_steps(3)
    if cold:
        forget_cached(tmp_path)
    saver.load()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in local_tensors(training.model).items())


def test_ours_is_committed_when_its_manifest_is_there(training, tmp_path):
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
        assert not rolling.committed  # nothing was copied yet: the older manifest is not its own
        while not rolling.committed:
            rolling.step()
            time.sleep(0.01)
        rows = OurRowSave(tmp_path / "saved", checkpointer, random_rows(checkpointer.shards, 1 / 8, seed=1))
        rows.begin()
        num_bytes = rows.finish()
        assert rows.idle
        assert whole - num_bytes > 0.8 * 26 * 1000 * 65 * 4


def test_random_rows_are_the_asked_share_of_every_shard(training):
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
    """A saver that waits, and is committed and idle after so many steps."""

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


def test_what_is_measured_of_a_save(training, tmp_path):
    bench = Bench(JOB, training, tmp_path, rank=0)
    measured = bench._measure("made up", lambda: MadeUp(commits_after=3, idle_after=6, wait_s=0.05))
    assert measured["steps"] == 4  # the commit is seen by the step after it
    assert measured["bytes"] == 17
    assert 5 * 0.05 <= measured["blocked_s"] < measured["wall_s"]
    assert 4 * 0.05 <= measured["committed_s"] < measured["wall_s"]
    assert measured["lost_s"] == pytest.approx(measured["wall_s"] - 4 * measured["undisturbed_step_s"])
    assert measured["after_s"] >= 3 * 0.05
    assert measured["lost_after_s"] == pytest.approx(measured["after_s"] - 3 * measured["undisturbed_step_s"])


def test_waiting_within_a_step_counts(training, tmp_path):
    class Holding(MadeUp):
        """Says that the first step after its beginning was held up."""

        asked = 0

        @property
        def held_up_s(self):
            self.asked += 1
            return 100.0 if self.asked > 1 else 0.0

    bench = Bench(JOB, training, tmp_path, rank=0)
    measured = bench._measure("made up", lambda: Holding(commits_after=2, idle_after=2, wait_s=0.05))
    assert 100 + 4 * 0.05 <= measured["blocked_s"] < 100 + measured["wall_s"]


def test_a_save_that_training_waits_for_has_no_steps(training, tmp_path):
    bench = Bench(JOB, training, tmp_path, rank=0)
    measured = bench._measure("made up", lambda: MadeUp(commits_after=0, idle_after=0, wait_s=0.05))
    assert measured["steps"] == 0
    assert measured["committed_s"] == measured["blocked_s"] >= 0.05


def test_memory_is_watched_while_a_save_goes_on():
    saver = MadeUp(commits_after=1, idle_after=1, wait_s=0)
    before = resident_bytes()
    with Watch(saver) as watch:
        saver.begin()
        with mmap.mmap(-1, 64 * 2**20) as taken:  # what an allocator gives may have been resident before
            taken[:: mmap.PAGESIZE] = b"x" * (len(taken) // mmap.PAGESIZE)
            time.sleep(0.1)
        saver.step()
        time.sleep(0.1)
    assert watch.peak_bytes - before > 50 * 2**20
    assert watch.committed_at > 0


def test_a_load_of_something_else_is_noticed(training, tmp_path):
    bench = Bench(JOB, training, tmp_path, rank=0)
    saver = DcpSave(tmp_path / "dcp save", training.model)
    bench._measure("dcp save", lambda: saver)
    loads = bench._loads("dcp", saver.load, "dcp save")
    assert sorted(loads) == ["dcp cold", "dcp warm"]
    with pytest.raises(RuntimeError, match="did not load what it had saved"):
        bench._loads("dcp", lambda: None, "dcp save")
