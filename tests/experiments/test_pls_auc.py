import json

import pytest

from experiments.emulation import runs as emulation_runs
from experiments.pls_auc import NEVER, SCHEMES, figures_of, main, plan

SLOPES = {scheme: 0.002 * (1 + number) for number, scheme in enumerate(SCHEMES)}


@pytest.fixture
def made_up(monkeypatch):
    """What is lost is a multiple of the PLS, another one for each scheme and seed; `never` does not depend on
    it."""

    def emulated(runs, _):
        for run in runs:
            pls = run.target_pls * (0.9 + 0.1 * run.seed) if run.scheme != "none" else 0.0
            by = 1.0 if run.scheme == NEVER else pls
            lost = SLOPES.get(run.scheme, 0.0) * (1 + run.seed / 10) * by
            yield run, {"auc": 0.75 + run.seed / 100 - lost, "pls": pls}

    monkeypatch.setattr(emulation_runs, "_emulated", emulated)


def test_the_whole_experiment_on_made_up_runs(tmp_path, monkeypatch, made_up):
    monkeypatch.chdir(tmp_path)
    assert main(["--quick"]) == 0
    stored = json.loads((tmp_path / "runs/quick/pls_auc.json").read_text())
    figures = stored["figures"]
    assert figures["loss_never"] == pytest.approx(SLOPES[NEVER] * 1.05)
    assert figures["loss_never_ci"] > 0
    assert not [name for name in figures if name in {"slope_never", "correlation_never"}]
    for scheme, slope in SLOPES.items():
        if scheme == NEVER:
            continue
        assert figures[f"slope_{scheme}"] == pytest.approx(slope * 1.05)
        assert figures[f"slope_{scheme}_ci"] > 0
    for ending in ("_sgd", "_dcnv2"):
        assert figures[f"slope_mfu{ending}"] == pytest.approx(SLOPES["mfu"] * 1.05)
        assert figures[f"loss_never{ending}"] == pytest.approx(SLOPES[NEVER] * 1.05)
    assert 0.99 < figures["pls_auc_correlation"] < 1
    assert {"pls_auc_correlation_low", "correlation_mfu_sgd_high"} <= figures.keys()
    assert figures["loss_ratio_mfu_to_random"] == pytest.approx(SLOPES["mfu"] / SLOPES["random"])
    assert (tmp_path / "runs/quick/pls_auc.png").stat().st_size > 10_000
    assert figures_of(stored["rows"]) == figures


def test_every_run_has_its_run_without_failures():
    runs = plan(1)
    assert len(set(runs)) == len(runs)
    assert {run.without_failures for run in runs} <= set(runs)
