"""Training and evaluating do not grow the process's memory."""

import mmap

import psutil
import pytest
import torch.distributed as dist

from data.synthetic import SyntheticConfig, generate
from dlrm.config.recipe import load_config
from dlrm.fault_tolerance.session import Session
from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.launch.stop_signal import StopSignal
from dlrm.training.build import build, start_process_group
from dlrm.training.data import prepare

BATCH_BYTES = 1024 * (13 * 4 + 26 * 8 + 4)
"""A batch of the recipe: the least that a step could leave behind, were it to leave its tensors."""


class Watch(Session):
    """Notes the memory of the process after each step, and keeps that many bytes of each step."""

    def __init__(self, leaked_bytes: int) -> None:
        self.rss_bytes: list[int] = []
        self._leaked_bytes = leaked_bytes
        self._kept: list[mmap.mmap] = []
        self._process = psutil.Process()

    def step(self) -> None:
        if self._leaked_bytes:  # fresh memory: an allocator may give what was resident before
            self._kept.append(mmap.mmap(-1, self._leaked_bytes))
            self._kept[-1].write(bytes(self._leaked_bytes))
        self.rss_bytes.append(self._process.memory_info().rss)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "data"
    generate(SyntheticConfig(days=2, rows_per_day=10 * 1024), folder)
    return folder


def rss_of_steps(dataset, runs, leaked_bytes):
    keep_freed_memory()
    overrides = [
        f"data.uri='{dataset}'",
        f"train.run_folder='{runs}'",
        "data.window_batches=8",
        "train.device=cpu",
        "train.epochs=100",
        "train.max_steps=300",
        "train.evaluate_every_steps=25",
        "train.log_every_steps=10",
    ]
    ranks = Ranks(rank=0, local_rank=0, world_size=1)
    inputs = prepare(load_config("tiny", overrides), "tiny", ranks)
    start_process_group(ranks, inputs.device)
    with StopSignal() as stop:
        trainer = build(inputs, stop)
        trainer.session = watch = Watch(leaked_bytes)
        try:
            trainer.train()
        finally:
            trainer.telemetry.close()
            inputs.close()
            dist.destroy_process_group()
    return watch.rss_bytes


def growth_bytes(rss_bytes):
    """From the highest point of the steps 100 to 150 to the lowest of the last 50: noise makes it smaller."""
    return min(rss_bytes[-50:]) - max(rss_bytes[100:150])


def grows(dataset, runs, leaked_bytes):
    """Whether memory grows over 100 steps by half a batch a step or more; in two runs, as a leak does."""
    for number in range(2):
        rss_bytes = rss_of_steps(dataset, runs / str(number), leaked_bytes)
        assert len(rss_bytes) == 300
        if growth_bytes(rss_bytes) <= BATCH_BYTES * (300 - 50 - 150) / 2:
            return False
    return True


@pytest.mark.system
@pytest.mark.parametrize("leak", [False, True], ids=["as it is", "with a leak of a batch a step"])
def test_memory_does_not_grow(dataset, tmp_path, leak):
    assert grows(dataset, tmp_path, leaked_bytes=BATCH_BYTES if leak else 0) == leak
