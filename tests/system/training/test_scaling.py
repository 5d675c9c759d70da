"""Two ranks measure gradient noise and what they send (`train.measure_scaling`)."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr.estimator.renting.trial import Trial
from data.loader import DataLoader, LoaderConfig
from dlrm.comm.links import measure_links
from dlrm.config.schema import TrainConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.fault_tolerance.session import Session
from dlrm.launch.stop_signal import StopSignal
from dlrm.pipeline.schedules import Plain
from dlrm.telemetry import scaling
from dlrm.telemetry.scaling import ScalingMeter
from dlrm.training.evaluation import evaluate
from dlrm.training.trainer import NUM_SCALARS, Trainer
from tests.dlrm.training.test_trainer import CallLog, OneLayer, PlainOptimizers
from tests.readmes import command

SIZE = 50
SIZES = (30, 70)
STEPS = 12
WINDOW = 5
SENT = 1000
"""Fp32 values that a rank sends to the other in a forward pass."""


class Noting(OneLayer):
    """Notes the samples that it has seen, and sends something, as embeddings would be."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, dense, sparse):
        if self.training:
            self.seen.append(dense.clone())
            values = torch.zeros(2 * SENT)
            dist.all_to_all_single(torch.empty_like(values), values)
        return super().forward(dense, sparse)


class Log(CallLog):
    """Keeps the figures, and labels as batches show them."""

    def __init__(self):
        super().__init__()
        self.figures, self.labels = [], []

    def step(self, *, labels, **others):
        super().step(**others)
        self.labels.append(labels.clone())

    def scaling(self, figures):
        self.figures.append(figures)


def work(dataset, path, sizes):
    scaling.WINDOW = WINDOW
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.manual_seed(0)
    model, telemetry = Noting(), Log()
    shared = {"rank": rank, "world_size": 2}
    loader = DataLoader(dataset, LoaderConfig(batch_size=SIZE), days=[0], **shared)
    loader.resize(sizes)
    test = DataLoader(dataset, LoaderConfig(batch_size=SIZE, drop_last=False), days=[1], **shared)
    link = measure_links(device).all_to_all
    with StopSignal() as stop:
        trainer = Trainer(
            config=TrainConfig(max_steps=STEPS, epochs=1000, log_every_steps=4),
            model=model,
            schedule=Plain(model),
            optimizers=PlainOptimizers(model),
            replicas=AllReduceSync(list(model.parameters()), NUM_SCALARS + scaling.NUM_SCALARS),
            loader=loader,
            evaluate=partial(evaluate, model, test, device),
            telemetry=telemetry,
            session=Session(),
            stop=stop,
            device=device,
            scaling=ScalingMeter(list(model.parameters()), 2, 2 * SIZE, link),
        )
        trainer.train()
    found = {"seen": model.seen, "labels": telemetry.labels, "figures": telemetry.figures}
    torch.save(found, f"{path}-{rank}")
    loader.close()
    test.close()
    dist.destroy_process_group()


def gradient_of(model, dense, labels):
    model.zero_grad()
    binary_cross_entropy_with_logits(model.layer(dense).squeeze(1), labels).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]).double()


def norms(ranks):
    """Squared norms of each step, of one process that trains on the samples of both ranks."""
    torch.manual_seed(0)
    model, found = OneLayer(), []
    optimizers = PlainOptimizers(model)
    for step in range(STEPS):
        parts = [(rank["seen"][step], rank["labels"][step]) for rank in ranks]
        own = [gradient_of(model, *part).square().sum() for part in parts]
        local = sum(len(part[1]) / (2 * SIZE) * each for part, each in zip(parts, own, strict=True))
        together = gradient_of(model, *(torch.cat(each) for each in zip(*parts, strict=True)))
        found.append((float(local), float(together.square().sum())))
        optimizers.step()
    return found


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", [(SIZE, SIZE), SIZES])
def test_norms_are_those_of_one_process(sizes, start_ranks, dataset, tmp_path):
    start_ranks(work, str(dataset), tmp_path / "found", sizes, world_size=2).wait(timeout_s=100)
    ranks = [torch.load(tmp_path / f"found-{rank}", weights_only=False) for rank in range(2)]
    assert tuple(len(rank["labels"][0]) for rank in ranks) == sizes
    wanted = torch.tensor(norms(ranks)).double()
    for rank in ranks:
        assert [each.noise.steps for each in rank["figures"]] == [2, 4, WINDOW]
        for figures, end in zip(rank["figures"], (4, 8, 12), strict=True):
            local, averaged = wanted[end - figures.noise.steps : end].mean(0).tolist()
            assert figures.noise.local == pytest.approx(local, rel=1e-4)
            assert figures.noise.averaged == pytest.approx(averaged, rel=1e-4)
            assert figures.pooled_bytes == pytest.approx(4 * SENT * 4 / (2 * SIZE))
            assert (figures.workers, figures.global_batch, figures.dense_bytes) == (2, 2 * SIZE, 4 * 14)
            assert figures.link.bytes_per_s > 0
    assert ranks[0]["figures"] == ranks[1]["figures"]


@pytest.mark.system
@pytest.mark.timeout(240)
def test_short_runs_of_the_trainer_are_trials(start, tmp_path):
    """The commands of `cpr/README.md`: a run with `train.measure_scaling`, and the plan from such runs."""
    made = command("dlrm/README.md", "data.synthetic")
    assert start(*made[1:], "--rows-per-day", "6000", "--out", tmp_path / "data").wait() == 0
    trained = command("cpr/README.md", "train.measure_scaling=true")
    overrides = trained[trained.index("--set") + 1 :]
    trials = []
    for workers, batch in ((1, 200), (1, 400), (2, 400)):
        runs = tmp_path / f"runs-{workers}-{batch}"
        more = (
            f"data.uri={tmp_path / 'data'}",
            f"data.global_batch_size={batch}",
            f"train.run_folder={runs}",
        )
        few = ("train.log_every_steps=3", "train.max_steps=15", "train.evaluate_every_steps=0")
        arguments = ("-m", "dlrm.train", "--recipe", "tiny", "--set", *overrides, *more, *few)
        process = start(*arguments, ranks=workers)
        assert process.wait() == 0, process.stderr.read()
        (folder,) = runs.iterdir()
        trials.append(folder)
    found = start(
        "-m", "cpr.cli", "plan", "--workers", 1, 2, "--price", 1, "--samples", "1e6", "--trial", *trials
    )
    out, errors = found.communicate()
    assert found.returncode == 0, errors
    assert out.startswith("Cheapest")
    lines = [line for line in _lines(trials[-1]) if line["kind"] == "scaling"]
    assert lines[-1]["noise"]["steps"] == 8
    assert lines[-1]["pooled_bytes"] > 0
    assert Trial.of("", _lines(trials[-1])).noise.local > 0


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
