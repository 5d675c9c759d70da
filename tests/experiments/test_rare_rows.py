import json

import pytest

from experiments.emulation import runs as emulation_runs
from experiments.rare_rows import SCHEMES, main


def test_the_whole_experiment_on_made_up_runs(tmp_path, monkeypatch):
    def emulated(runs, _):
        for run in runs:
            lost = 0 if run.scheme == "none" else run.failures * (1 + run.seed)
            parts = {"head": 1, "torso": 2, "tail": 4}
            yield (
                run,
                {f"auc_{part}": 0.7 - lost * factor / 1e4 for part, factor in parts.items()}
                | {
                    "auc": 0.7,
                    "pls": 0.1,
                },
            )

    monkeypatch.setattr(emulation_runs, "_emulated", emulated)
    monkeypatch.chdir(tmp_path)
    assert main(["--quick"]) == 0
    figures = json.loads((tmp_path / "runs/quick/rare_rows.json").read_text())["figures"]
    for scheme in SCHEMES:
        assert figures[f"auc_delta_{scheme}_tail"] == pytest.approx(-12e-4)
        assert figures[f"auc_delta_{scheme}_head_8_failures"] == pytest.approx(-12e-4)
        for ending in ("", "_sgd", "_dcnv2"):
            assert figures[f"tail_minus_head_{scheme}{ending}"] == pytest.approx(-36e-4)
        assert figures[f"tail_minus_head_{scheme}_ci"] > 0
    assert (tmp_path / "runs/quick/rare_rows.png").stat().st_size > 10_000
