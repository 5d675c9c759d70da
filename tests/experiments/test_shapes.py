"""The comparison in all shapes on made-up speeds, and TorchRec's side of the models that differ."""

import json
from dataclasses import asdict, replace

import pytest

from experiments import shapes
from experiments.harness.workload import Setting, Workload
from experiments.throughput.worker import main as work

SPEEDS = {
    "ours fp32 1x2": 60.0,
    "ours fp32 2x1": 50.0,
    "torchrec fp32 1x2": 40.0,
    "torchrec fp32 1x2 pipelined": 30.0,
    "torchrec fp32 1x2 keeps memory": 48.0,
}


def test_whole_experiment_on_made_up_speeds(run_quick, monkeypatch):
    launched = []

    def launch(setting, workload):
        launched.append(setting.name)
        slower = 0.9 if workload.recipe == "deepfm" and setting.trainer == "ours" else 1
        return {"samples_per_s": SPEEDS[setting.name] * slower}

    monkeypatch.setattr(shapes, "launch", launch)
    monkeypatch.setattr(shapes, "PRECISIONS", ("fp32",))
    figures = run_quick(shapes.main, "shapes")["figures"]
    assert figures["ratio_kaggle_128"] == 60 / 40
    assert figures["ratio_kaggle_128_keeping_memory"] == 60 / 48
    assert figures["worst_ratio_to_torchrec"] == figures["ratio_deepfm_2048"] == pytest.approx(54 / 40)
    assert figures["worst_ratio_keeping_memory"] == pytest.approx(54 / 48)
    chosen = ("torchrec fp32 1x2", "ours fp32 1x2", "torchrec fp32 1x2 keeps memory")
    assert tuple(launched[-3:]) == chosen
    assert len(launched) == 2 * (4 + 3), "each setting once, then the chosen ones"


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_shape_counts_by_its_median_and_not_by_the_choice_of_settings(rounds):
    rows = [
        {"shape": "kaggle_128", "round": number, "setting": name, "samples_per_s": rate / (1 + (number or 0))}
        for number in (None, *range(rounds))
        for name, rate in {**SPEEDS, "ours fp32 1x2": 600.0 if number is None else 60.0}.items()
    ]
    figures = shapes.figures_of(rows)
    assert figures["worst_ratio_to_torchrec_low"] == figures["worst_ratio_to_torchrec_high"] == 1.5


@pytest.mark.system
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("recipe", ["dcnv2", "deepfm", "kaggle"])
def test_torchrec_trains_the_model_of_a_recipe(recipe, pipelined, tmp_path):
    setting = Setting(trainer="torchrec", precision="fp32", processes=1, pipelined=pipelined)
    workload = replace(
        Workload(recipe=recipe), rows=500, global_batch_size=64, warm_up_steps=2, steps=3, num_batches=2
    )
    out = tmp_path / "measured.json"
    job = {"setting": asdict(setting), "workload": asdict(workload), "profiled": False, "out": str(out)}
    assert work([json.dumps(job)]) == 0
    assert json.loads(out.read_text())["step_s"] > 0
