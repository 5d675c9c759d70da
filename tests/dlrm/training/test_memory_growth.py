"""Training and evaluating do not grow the process's memory."""

import mmap
import multiprocessing

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

BATCH_SIZE = 128
WARM_UP, AS_IT_IS, LEAKING = 100, 100, 100
"""Steps; an evaluation is in every 25."""
SAMPLE_BYTES = 13 * 4 + 26 * 8 + 4
LEAST_GROWTH_BYTES = {"in use": BATCH_SIZE * SAMPLE_BYTES, "resident": 1024 * SAMPLE_BYTES}
"""What counts as growth of each kind of memory, per step.

Of what is allocated from the C library, a batch: the least that a step could leave behind, were it to leave
its tensors. Of resident memory, in which freed fragments vary by megabytes, a batch of 1,024 samples.
"""


class Watch(Session):
    """Notes the memory of the process after each step, and leaks the least growth in the last steps."""

    def __init__(self) -> None:
        self.memory_bytes: dict[str, list[int]] = {kind: [] for kind in LEAST_GROWTH_BYTES}
        self._kept: list[object] = []
        self._process = psutil.Process()

    def step(self, samples: int) -> None:
        resident = self.memory_bytes["resident"]
        if len(resident) >= WARM_UP + AS_IT_IS:
            # fresh: an allocator may give what was resident
            fresh = mmap.mmap(-1, LEAST_GROWTH_BYTES["resident"], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            fresh.write(bytes(len(fresh)))
            self._kept += fresh, bytearray(LEAST_GROWTH_BYTES["in use"])
        memory = self._process.memory_info()
        resident.append(memory.rss - memory.shared)  # the system may drop pages of files, as of libraries
        heap = psutil.heap_info()
        self.memory_bytes["in use"].append(heap.heap_used + heap.mmap_used)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "data"
    generate(SyntheticConfig(days=2, rows_per_day=10 * BATCH_SIZE), folder)
    return folder


def memory_of_steps(dataset, runs):
    keep_freed_memory()
    overrides = [
        f"data.uri='{dataset}'",
        f"train.run_folder='{runs}'",
        f"data.global_batch_size={BATCH_SIZE}",
        "data.window_batches=8",
        "train.device=cpu",
        "train.epochs=100",
        f"train.max_steps={WARM_UP + AS_IT_IS + LEAKING}",
        "train.evaluate_every_steps=25",
        "train.log_every_steps=10",
    ]
    ranks = Ranks(rank=0, local_rank=0, world_size=1)
    inputs = prepare(load_config("tiny", overrides), "tiny", ranks)
    start_process_group(ranks, inputs.device)
    with StopSignal() as stop:
        trainer = build(inputs, stop)
        trainer.session = watch = Watch()
        try:
            trainer.train()
        finally:
            trainer.telemetry.close()
            inputs.close()
            dist.destroy_process_group()
    return watch.memory_bytes


def grows(memory_bytes, least):
    """By half of `least` a step or more, from the most of the first 25 steps to the least of the last 25."""
    return min(memory_bytes[-25:]) - max(memory_bytes[:25]) > least * (len(memory_bytes) - 2 * 25) / 2


@pytest.mark.system
def test_memory_does_not_grow(dataset, tmp_path):
    # in a new process: what earlier tests have left in this one may be freed meanwhile
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        memory_bytes = pool.apply(memory_of_steps, (dataset, tmp_path))
    for kind, least in LEAST_GROWTH_BYTES.items():
        of_kind = memory_bytes[kind]
        assert len(of_kind) == WARM_UP + AS_IT_IS + LEAKING
        assert not grows(of_kind[WARM_UP:-LEAKING], least), kind
        assert grows(of_kind[-LEAKING:], least), kind
