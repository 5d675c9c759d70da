import json

import pytest
import torch.distributed as dist

from data.synthetic import SyntheticConfig
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.training.data import prepare
from dlrm.training.evaluation import evaluate
from experiments.codecs import run as codecs
from experiments.codecs.run import CodecJob, figures_of, main
from experiments.codecs.worker import main as work
from experiments.harness.training import Training
from tests.datasets import generate_few

EXACT = [0.76, 0.77, 0.755]
ROWS = [
    {
        "seed": seed,
        "auc": {"exact": auc, "fp16": auc, "int8": auc - 0.0001 * seed, "int4": auc - 0.002 + 0.001 * seed},
        "max_error": {"exact": 0.0, "fp16": 1e-4, "int8": 1e-3, "int4": 0.01 * (seed + 1)},
    }
    for seed, auc in enumerate(EXACT)
]


def test_whole_experiment_on_made_up_runs(run_quick, tmp_path, monkeypatch):
    generate_few(SyntheticConfig(rows_per_day=2000, days=2), tmp_path / "dataset")
    asked = []

    def measure(job):
        asked.append((job.seed, job.max_steps, job.dataset))
        return ROWS[job.seed]

    monkeypatch.setattr(codecs, "_measure", measure)
    figures = run_quick(main, "codecs", "dataset")["figures"]
    assert asked == [(seed, 8, str(tmp_path / "dataset")) for seed in (0, 1)]
    assert figures == pytest.approx(figures_of(ROWS[:2]))


@pytest.mark.system
def test_one_seed_on_one_worker(tmp_path):
    """An exact save and load leave the final AUC as it is; lossy rows change it."""
    generate_few(SyntheticConfig(rows_per_day=8 * 1024, days=2), tmp_path / "dataset")
    job = {"dataset": str(tmp_path / "dataset"), "seed": 3, "max_steps": 6}
    out = tmp_path / "measured.json"
    assert work([json.dumps({"job": job, "scratch": str(tmp_path), "out": str(out)})]) == 0
    measured = json.loads(out.read_text())
    assert (measured["steps"], measured["saved_at"]) == (6, 4)
    assert measured["auc"]["exact"] == undisturbed_auc(CodecJob(**job), tmp_path)
    assert len(set(measured["auc"].values())) == 4
    errors = measured["max_error"]
    assert 0 == errors["exact"] < errors["fp16"] < errors["int8"] < errors["int4"]


def undisturbed_auc(job, tmp_path):
    overrides = [f"data.uri={job.dataset}", f"train.seed={job.seed}", "train.device=cpu"]
    ranks = Ranks(0, 0, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    inputs = prepare(load_config("tiny", [*overrides, f"train.run_folder={tmp_path}"]), "tiny", ranks)
    try:
        training = Training(inputs, iter(list(inputs.loader)))
        training.timed_steps(job.max_steps)
        return evaluate(training.model, inputs.test_loader, inputs.device).auc
    finally:
        inputs.close()
        dist.destroy_process_group()
