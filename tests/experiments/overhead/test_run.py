import json
import multiprocessing
from dataclasses import replace

import pytest

from experiments.emulation import runs as emulation_runs
from experiments.emulation.emulation import SCHEMES, Run
from experiments.overhead import quality
from experiments.overhead import run as overhead
from experiments.overhead.accounting import account
from experiments.overhead.quality import plan
from experiments.overhead.run import main
from tests import forks

TRACKING = {"finished": "yes", "figures": {"mfu_step_share": 0.008}}
SAVING = {"finished": "yes", "rows": [{"key": "memory"}]}
for number, blocked_s in enumerate((0.01, 0.02, 0.09)):
    SAVING["rows"].append(
        {
            "key": f"round {number}",
            "round": number,
            "savers": {
                "ours rows": {"blocked_s": blocked_s, "lost_s": 0.25},
                "dcp save": {"blocked_s": 4.0},
            },
        }
    )


@pytest.fixture
def made_up(monkeypatch):
    """Every scheme loses ten thousandths as it comes in the list, a little more with each seed."""

    def emulated(runs, _):
        for run in runs:
            lost = SCHEMES.index(run.scheme) * (1 + run.seed / 10) * (1 if run.network == "dlrm" else 2)
            yield (
                run,
                {
                    "auc": 0.75 + run.seed / 100 - lost / 1e4,
                    "pls": 0.1,
                    "rows_saved": 60 if run.scheme == "mfu" else 80,
                },
            )

    monkeypatch.setattr(emulation_runs, "_emulated", emulated)


def test_the_headline_comes_first_and_every_run_once():
    runs = plan(4)
    assert [run.scheme for run in runs[:4]] == ["none", "mfu", "ssu", "scar"]
    assert len(set(runs)) == len(runs)
    assert {run.without_failures for run in runs} <= set(runs)
    assert all(run.seed == 4 for run in runs)


def test_the_papers_percentages_come_out(tmp_path):
    figures = account(tmp_path).figures()
    assert figures["overhead_full"] == pytest.approx(0.085, abs=0.0005)
    assert figures["overhead_cpr"] == pytest.approx(0.0053, abs=0.00005)
    assert figures["overhead_partial_naive"] == pytest.approx(
        figures["overhead_full"] - figures["overhead_full_lost"]
    )
    assert figures["overhead_cpr_save"] == pytest.approx(5.6 / 60 / 44.8)


def test_measured_costs_are_added_and_what_was_not_measured_is_missing_with_its_reason(tmp_path):
    nothing = account(tmp_path)
    assert nothing.figures()["overhead_cpr_background"] is None
    assert "checkpointing" in nothing.missing["overhead_cpr_background"]
    (tmp_path / "checkpointing.json").write_text(json.dumps({**SAVING, "finished": None}))
    assert account(tmp_path) == nothing
    (tmp_path / "checkpointing.json").write_text(json.dumps(SAVING))
    assert account(tmp_path).missing.keys() == {"overhead_cpr_background_tracked"}
    (tmp_path / "tracking.json").write_text(json.dumps(TRACKING))
    assert not account(tmp_path).missing
    figures = account(tmp_path).figures()
    # eight row saves of 0.02 s where a synchronous save takes 4 s
    assert figures["overhead_cpr_background_save"] == pytest.approx(figures["overhead_cpr_save"] * 0.04)
    assert figures["overhead_cpr_background_often_save"] == pytest.approx(
        5 * figures["overhead_cpr_background_save"]
    )
    assert figures["overhead_cpr_background_slowed_save"] == pytest.approx(figures["overhead_cpr_save"] * 0.5)
    assert figures["overhead_cpr_background_recovery"] == figures["overhead_cpr_recovery"]
    assert figures["overhead_cpr_background_tracked"] == pytest.approx(
        figures["overhead_cpr_background_slowed"] + 0.008
    )


def test_the_whole_experiment_on_made_up_runs(tmp_path, monkeypatch, made_up):
    monkeypatch.chdir(tmp_path)
    assert main(["--quick"]) == 0
    stored = json.loads((tmp_path / "runs/quick/overhead.json").read_text())
    figures = stored["figures"]
    for ending, factor in (("", 1), ("_sgd", 1), ("_dcnv2", 2)):
        for scheme in ("mfu", "ssu", "scar", "vanilla", "naive", "random", "never"):
            expected = -SCHEMES.index(scheme) * 1.05 * factor / 1e4
            assert figures[f"auc_delta_{scheme}{ending}"] == pytest.approx(expected)
            assert figures[f"auc_delta_{scheme}{ending}_ci"] > 0
    assert figures["auc_without_failures"] == pytest.approx(0.755)
    assert (figures["budget_used_mfu"], figures["budget_used_ssu"]) == (0.75, 1)
    assert len(stored["rows"]) == 2 * len(plan(0))
    assert (tmp_path / "runs/quick/overhead.png").stat().st_size > 10_000


@pytest.mark.system
@pytest.mark.timeout(300)
def test_real_runs_in_two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quality, "SCHEMES", ("mfu", "vanilla", "random"))
    monkeypatch.setattr(quality, "CHOOSING", ("mfu",))
    monkeypatch.setattr(quality, "NETWORKS", {"": quality.NETWORKS[""]})
    monkeypatch.setattr(overhead, "NETWORK_NAMES", {"": overhead.NETWORK_NAMES[""]})
    context = forks.context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    assert main(["--quick"]) == 0
    stored = json.loads((tmp_path / "runs/quick/overhead.json").read_text())
    rows = {row["key"]: row for row in stored["rows"]}
    assert set(rows) == {run.name for seed in (0, 1) for run in plan(seed)}
    for seed in (0, 1):
        runs = [rows[Run(scheme=scheme, seed=seed).name] for scheme in ("none", "mfu", "vanilla", "random")]
        assert len({row["auc"] for row in runs}) == 4
        assert runs[1]["pls"] == runs[2]["pls"] == runs[3]["pls"] > runs[0]["pls"] == 0
        assert runs[1]["rows_saved"] <= runs[3]["rows_saved"]
    assert replace(Run(scheme="mfu", seed=0), target_pls=0.02).name in rows
