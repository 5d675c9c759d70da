"""Two ranks, one of which is slow, train with batches by their speed."""

import json
import re
import signal
from functools import partial
from time import sleep

import pytest
import torch
import torch.distributed as dist

from data.loader import DataLoader, LoaderConfig
from dlrm.batching.dynamic import DynamicBatching
from dlrm.config.schema import TrainConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.fault_tolerance.session import Session
from dlrm.launch.stop_signal import StopSignal
from dlrm.pipeline.schedules import Plain
from dlrm.sharding.worker_speeds import SPEEDS_NAME
from dlrm.training.evaluation import evaluate
from dlrm.training.trainer import NUM_SCALARS, Trainer
from tests.dlrm.training.test_trainer import CallLog, OneLayer, PlainOptimizers
from tests.system.runs import report_of, wait_for_step
from tests.system.training.test_resume import workers_of

SIZE = 50
SAMPLE_S = {0: 8e-4, 1: 2.4e-3}
"""Seconds that a rank takes for a sample: much against the rest of a step, also on a busy machine."""
STEPS = 60


class Slow(OneLayer):
    """Takes as long as the rank does, and notes the samples that it has seen."""

    def __init__(self):
        super().__init__()
        self.seen, self.sizes = [], []

    def forward(self, dense, sparse):
        if self.training:
            sleep(len(dense) * SAMPLE_S[dist.get_rank()])
            self.seen += map(tuple, dense.tolist())
            self.sizes.append(len(dense))
        return super().forward(dense, sparse)


def work(dataset, path):
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.manual_seed(0)
    model = Slow()
    with StopSignal() as stop:
        shared = {"rank": rank, "world_size": 2}
        loader = DataLoader(dataset, LoaderConfig(batch_size=SIZE), days=[0], **shared)
        test = DataLoader(dataset, LoaderConfig(batch_size=SIZE, drop_last=False), days=[1], **shared)
        telemetry = CallLog()
        trainer = Trainer(
            config=TrainConfig(max_steps=STEPS, epochs=1000),
            model=model,
            schedule=Plain(model),
            optimizers=PlainOptimizers(model),
            replicas=AllReduceSync(list(model.parameters()), NUM_SCALARS + 2),
            loader=loader,
            evaluate=partial(evaluate, model, test, device),
            telemetry=telemetry,
            session=Session(),
            stop=stop,
            device=device,
            batching=DynamicBatching(loader, rank, 2, keep=lambda speeds: None),
        )
        trainer.train()
    found = {
        "sizes": model.sizes,
        "seen": model.seen,
        "weights": [each.detach().clone() for each in model.parameters()],
        "samples": [entry[2] for entry in telemetry.entries if entry[0] == "step"],
        "epoch": len(loader),
        "state": loader.state_dict(),
    }
    torch.save(found, f"{path}-{rank}")
    loader.close()
    test.close()
    dist.destroy_process_group()


def seen_in(rank, begin):
    """The samples of an epoch that begins with this step."""
    first, last = (sum(rank["sizes"][:step]) for step in (begin, begin + rank["epoch"]))
    return rank["seen"][first:last]


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_slow_rank_gets_less_of_each_global_batch(start_ranks, dataset, tmp_path):
    start_ranks(work, str(dataset), tmp_path / "found", world_size=2).wait(timeout_s=100)
    fast, slow = (torch.load(tmp_path / f"found-{rank}", weights_only=False) for rank in range(2))
    assert fast["sizes"][0] == slow["sizes"][0] == SIZE
    assert all(mine + its == 2 * SIZE for mine, its in zip(fast["sizes"], slow["sizes"], strict=True))
    assert 68 <= fast["sizes"][-1] <= 82, "75 take both equally long"
    assert len(set(fast["sizes"])) <= 6, "it settles"
    assert fast["samples"] == slow["samples"] == [2 * SIZE * step for step in range(1, STEPS + 1)]
    for one, other in zip(fast["weights"], slow["weights"], strict=True):
        assert torch.equal(one, other)
    assert fast["state"] == slow["state"]
    assert fast["state"]["sizes"] == [fast["sizes"][-1], slow["sizes"][-1]]
    for begin in range(0, STEPS, fast["epoch"]):
        seen = seen_in(fast, begin) + seen_in(slow, begin)
        assert len(set(seen)) == len(seen), "each sample once an epoch"


MOVED = re.compile(r"rank 0 \((\d+)% of the samples\) has (\d+) kB, rank 1 \((\d+)% .*\) has ([\d.]+) kB")
RECIPE = """
[data]
global_batch_size = 80

[model]
kind = "tests.system.training.slow_model:SlowOnRank1"
embedding_dim = 16

[sharding]
strategy = "torchrec"
kinds = ["table_wise"]
data_parallel_rows = 0

[train]
batching = "dynamic"
epochs = 100
log_every_steps = 5

[checkpoint]
every_steps = 20
"""


@pytest.mark.system
@pytest.mark.timeout(240)
def test_tables_leave_a_slow_rank_when_the_run_is_resumed(start, dataset, memory, tmp_path):
    """But not when a worker dies in between, as the tables are in memory then."""

    def train(*arguments):
        environment = {"CPR_RESIDENT_ROOT": str(memory)}
        program = ("-m", "dlrm.train", *arguments)
        return start(*program, ranks=2, restarts=1, environment=environment, forks=True)

    recipe, runs = tmp_path / "slow.toml", tmp_path / "runs"
    recipe.write_text(RECIPE)
    run = train("--recipe", recipe, "--set", f"data.uri={dataset}", f"train.run_folder={runs}")
    wait_for_step(run, runs, 40)
    workers_of(run)[1].kill()
    folder = wait_for_step(run, runs, 80)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert "the memory of all workers survived" in said
    assert "tables are laid out" not in said
    fast, slow = json.loads((folder / SPEEDS_NAME).read_text())["speeds"].values()
    assert fast > 2 * slow

    run = train("--resume", folder, "--set", "train.max_steps=150")
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert "batches of" not in said.partition("tables are laid out")[0]
    share, kilobytes, slow_share, slow_kilobytes = map(float, MOVED.search(said).groups())
    assert (share, slow_share) == (round(100 * fast / (fast + slow)), round(100 * slow / (fast + slow)))
    assert kilobytes > 1.5 * slow_kilobytes
    assert report_of(folder)["steps"] == 150
    assert report_of(folder)["failures"]["pls"] == 0
