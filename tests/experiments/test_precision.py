import pytest

from data.dataset import DatasetManifest
from experiments import precision
from experiments.harness.samples import identity_of
from experiments.precision import main


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
    assert stored["config"]["dataset"] == identity_of(str(tmp_path))
    assert (tmp_path / "runs/quick/learning_curve.png").stat().st_size > 10_000


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forks")
def test_quick_run_through_the_trainers_command(run_quick):
    stored = run_quick(main, "precision")
    assert [row["steps"] for row in stored["rows"]] == [4] * 4
    assert [len(row["curve"]) for row in stored["rows"]] == [1, 2, 1, 1]
    assert all(0.4 < row["auc"] < 0.9 for row in stored["rows"])
    assert len({row["auc"] for row in stored["rows"]}) == 4  # seeds and precisions have an effect
