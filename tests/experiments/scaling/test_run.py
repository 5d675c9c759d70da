import json

import pytest

from cpr.estimator.planning.formulas import interval_partial
from experiments.scaling.jobs import JOB, LAWS, SCHEMES, TARGET_PLS, job_at, waiting_share
from experiments.scaling.run import SHOWN_NODES, main


def test_failures_grow_with_the_nodes():
    assert job_at(8, "independent") == job_at(8, "milder") == JOB
    assert job_at(80, "independent").T_fail == JOB.T_fail / 10
    assert job_at(800, "milder").T_fail == pytest.approx(JOB.T_fail / 10)
    assert job_at(80, "independent", 0.25).O_blocked == JOB.O_save / 4
    # Nodes that fail alike make the partial interval the same for any number of them.
    intervals = [interval_partial(job_at(nodes, "independent"), TARGET_PLS) for nodes in (8, 100, 10_000)]
    assert intervals == pytest.approx([44.8 * 3600] * 3)


def test_the_share_that_a_background_save_costs_is_the_measured_one(tmp_path):
    with pytest.raises(ValueError, match=r"run python -m experiments.checkpointing first"):
        waiting_share(tmp_path)
    stored = {"finished": None, "figures": {}}
    (tmp_path / "checkpointing.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="is not finished"):
        waiting_share(tmp_path)
    stored = {"finished": "now", "figures": {"throughput_while_saving": 0.75}}
    (tmp_path / "checkpointing.json").write_text(json.dumps(stored))
    assert waiting_share(tmp_path) == 0.25


@pytest.mark.system
def test_quick_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.scaling.run.waiting_share", lambda: 0.3)
    assert main(["--quick"]) == 0
    stored = json.loads((tmp_path / "runs/quick/scaling.json").read_text())
    figures = stored["figures"]
    for law in LAWS:
        ending = "" if law == "independent" else f"_{law}"
        for nodes in SHOWN_NODES:
            overheads = {scheme: figures[f"overhead_{scheme}_{nodes}{ending}"] for scheme in SCHEMES}
            assert overheads["partial"] < overheads["full_background"] < overheads["full"]
    assert figures["overhead_full_1000"] > 1 > figures["overhead_full_1000_milder"]
    assert figures["pls_break_even_8"] == pytest.approx(0.0025, abs=1e-4)
    assert figures["full_over_formula_interval_3"] > 2 > figures["full_over_formula_interval_0.1"]
    assert figures["pls_over_formula_groups"] > 1.3
    assert all(name in stored["notes"] for name, value in figures.items() if value is None)
    assert (tmp_path / "runs/quick/scaling.png").stat().st_size > 50_000
