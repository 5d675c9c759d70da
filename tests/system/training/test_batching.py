"""Two ranks, one of which is slow, train with batches by their speed."""

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
from dlrm.training.evaluation import evaluate
from dlrm.training.trainer import NUM_SCALARS, Trainer
from tests.dlrm.training.test_trainer import CallLog, OneLayer, PlainOptimizers

SIZE = 50
SAMPLE_S = {0: 2e-4, 1: 6e-4}
"""Seconds that a rank takes for a sample."""
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
            batching=DynamicBatching(loader, rank, 2),
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
