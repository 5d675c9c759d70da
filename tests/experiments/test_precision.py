from statistics import mean

import numpy as np
import pytest
from scipy.stats import ttest_rel

from data.dataset import DatasetManifest
from data.synthetic import SyntheticConfig, generate
from experiments import precision
from experiments.precision import figures_of, main


def rows_of(fp32, bf16):
    runs = {"fp32": fp32, "bf16": bf16}
    return [
        {"precision": name, "seed": seed, "auc": auc} for name in runs for seed, auc in enumerate(runs[name])
    ]


def test_interval_is_that_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    fp32 = rng.normal(0.76, 0.002, 5)
    bf16 = fp32 + rng.normal(0.0001, 0.0003, 5)
    figures = figures_of(rows_of(fp32, bf16)[::-1])
    interval = ttest_rel(bf16, fp32).confidence_interval(0.95)
    assert figures["auc_bf16_minus_fp32"] == pytest.approx(mean(bf16 - fp32))
    centre, reach = figures["auc_bf16_minus_fp32"], figures["auc_bf16_minus_fp32_ci"]
    assert (centre - reach, centre + reach) == pytest.approx((interval.low, interval.high))


def test_whole_experiment_on_made_up_runs(run_quick, tmp_path, monkeypatch):
    asked = []

    def train(folder, seed, name, *, max_steps, evaluate_every):
        asked.append((seed, name, evaluate_every))
        point = {"samples": 1, "auc": 0.7, "log_loss": 0.5}
        auc = 0.76 + 0.001 * seed + (0.0002 if name == "bf16" else 0.0)
        curve = [point] * (5 if evaluate_every else 1)
        return {"auc": auc, "best_auc": 0.8, "curve": curve, "samples_per_s": 1.0}

    monkeypatch.setattr(precision, "_train", train)
    (tmp_path / "dataset.json").write_text(DatasetManifest(features=(), parts=()).to_json())
    stored = run_quick(main, "precision", str(tmp_path))
    assert asked == [(0, "fp32", 0), (0, "bf16", 2), (1, "bf16", 0), (1, "fp32", 0)]
    assert stored["figures"]["auc_bf16_minus_fp32"] == pytest.approx(0.0002)
    assert stored["seeds"] == [0, 1]
    assert (tmp_path / "runs/quick/learning_curve.png").stat().st_size > 10_000


def test_interrupted_experiment_does_not_continue_with_other_samples(tmp_path, monkeypatch):
    """The other samples are equally many, so that only their identity differs."""
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
    monkeypatch.setattr(precision, "draw", lambda *_: None)
    assert main(["--quick", str(tmp_path / "data 2")]) == 0
    assert [folder for folder, *_ in trained] == ["data 1"] * 3 + ["data 2"] * 4


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forks")
def test_quick_run_through_the_trainers_command(run_quick):
    stored = run_quick(main, "precision")
    assert [row["steps"] for row in stored["rows"]] == [4] * 4
    assert [len(row["curve"]) for row in stored["rows"]] == [1, 2, 1, 1]
    assert all(0.4 < row["auc"] < 0.9 for row in stored["rows"])
    assert len({row["auc"] for row in stored["rows"]}) == 4  # seeds and precisions have an effect
