import json
from statistics import mean

import numpy as np
import pytest
from scipy.stats import ttest_rel

from data.dataset import DatasetManifest
from data.synthetic import SyntheticConfig, generate
from experiments import precision
from experiments.precision import differences, figures_of, half_width, main


def rows_of(fp32, bf16):
    runs = {"fp32": fp32, "bf16": bf16}
    return [
        {"precision": name, "seed": seed, "auc": auc} for name in runs for seed, auc in enumerate(runs[name])
    ]


def test_runs_are_compared_seed_by_seed():
    rows = rows_of(fp32=[0.70, 0.80], bf16=[0.71, 0.79])
    rows.reverse()
    assert sorted(differences(rows)) == pytest.approx([-0.01, 0.01])


def test_the_interval_is_that_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    fp32 = rng.normal(0.76, 0.002, 5)
    bf16 = fp32 + rng.normal(0.0001, 0.0003, 5)
    figures = figures_of(rows_of(fp32, bf16))
    interval = ttest_rel(bf16, fp32).confidence_interval(0.95)
    assert figures["auc_bf16_minus_fp32"] == pytest.approx(mean(bf16 - fp32))
    centre, reach = figures["auc_bf16_minus_fp32"], figures["auc_bf16_minus_fp32_ci"]
    assert (centre - reach, centre + reach) == pytest.approx((interval.low, interval.high))


def test_the_interval_holds_the_true_mean_as_often_as_it_says():
    samples = np.random.default_rng(1).normal(3.0, 2.0, (2000, 5))
    held = [abs(mean(sample) - 3.0) <= half_width(sample) for sample in samples.tolist()]
    assert 0.935 < mean(held) < 0.965


def test_the_whole_experiment_on_made_up_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def train(folder, seed, name, *, max_steps, evaluate_every):
        asked.append((seed, name, evaluate_every))
        point = {"samples": 1, "auc": 0.7, "log_loss": 0.5}
        auc = 0.76 + 0.001 * seed + (0.0002 if name == "bf16" else 0.0)
        curve = [point] * (5 if evaluate_every else 1)
        return {"auc": auc, "best_auc": 0.8, "curve": curve, "samples_per_s": 1.0}

    monkeypatch.setattr(precision, "_train", train)
    (tmp_path / "dataset.json").write_text(DatasetManifest(features=(), parts=()).to_json())
    assert main(["--quick", str(tmp_path)]) == 0
    assert asked == [(0, "fp32", 0), (0, "bf16", 2), (1, "bf16", 0), (1, "fp32", 0)]
    stored = json.loads((tmp_path / "runs/quick/precision.json").read_text())
    assert stored["figures"]["auc_bf16_minus_fp32"] == pytest.approx(0.0002)
    assert stored["seeds"] == [0, 1]
    for picture in ("precision", "learning_curve"):
        assert (tmp_path / f"runs/quick/{picture}.png").stat().st_size > 10_000


def test_an_interrupted_experiment_does_not_go_on_with_other_samples(tmp_path, monkeypatch):
    """As many of them as there were, of other days."""
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        generate(SyntheticConfig(days=2, rows_per_day=1000, seed=seed), tmp_path / f"data {seed}")
    row = {"auc": 0.7, "best_auc": 0.8, "curve": [], "samples_per_s": 1.0}
    trained = []

    def train(folder, seed, name, **_):
        trained.append((folder.name, seed, name))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return row

    monkeypatch.setattr(precision, "_train", train)
    with pytest.raises(KeyboardInterrupt):
        main(["--quick", str(tmp_path / "data 1")])
    monkeypatch.setattr(precision, "_draw_curve", lambda *_: None)
    assert main(["--quick", str(tmp_path / "data 2")]) == 0
    assert [folder for folder, *_ in trained] == ["data 1"] * 3 + ["data 2"] * 4


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forks")
def test_quick_run_through_the_trainers_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--quick"]) == 0
    stored = json.loads((tmp_path / "runs/quick/precision.json").read_text())
    assert [row["steps"] for row in stored["rows"]] == [4] * 4
    assert [len(row["curve"]) for row in stored["rows"]] == [1, 2, 1, 1]
    assert all(0.4 < row["auc"] < 0.9 for row in stored["rows"])
    assert len({row["auc"] for row in stored["rows"]}) == 4  # seeds and precisions were heeded
