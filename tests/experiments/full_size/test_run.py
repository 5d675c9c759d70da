"""Figures of training at full size, and the whole experiment on made-up measurements."""

import pytest

from experiments.full_size import run
from experiments.full_size.run import SETTINGS, figures_of


def job(kill_s, *, rival_s=8.0):
    shares = {"started": 4, "imported": 0, "met": 0, "built": 2, "restored": 2, "stepped": 8}
    phases = {event: kill_s * share / 16 for event, share in shares.items()}
    ours = {
        **{"start": phases, "kill": phases, "node": phases, "step_s": 0.2, "save_bytes": 8e9},
        **{"save_committed_s": 4.0, "peak_bytes": 110, "trained_bytes": 90, "table_bytes": 80},
        "write_s": 0.4,
    }
    rival = {
        **ours,
        "kill": dict.fromkeys(phases, rival_s / 6),
        "trained_bytes": 100,
        "step_s": 0.1,
        "save_bytes": 4e9,
    }
    return {"axis": "rows", "value": 7, "ours": ours, "rival": rival}


def test_figures_are_medians_of_ratios_within_rounds():
    rows = [
        {"round": number, "setting": setting.name, "samples_per_s": ours if setting.trainer == "ours" else 1}
        for number, ours in enumerate((3, 4, 6))
        for setting in SETTINGS
    ]
    figures = figures_of([job(1), job(2), job(4, rival_s=40), *rows])
    assert figures["big_rows"] == 7
    assert figures["big_kill_ratio"] == pytest.approx(1 / 8)
    assert (figures["big_kill_ratio_low"], figures["big_kill_ratio_high"]) == pytest.approx((0.1, 0.25))
    assert figures["big_memory_overhead"] == pytest.approx(10 / 80)
    assert (figures["big_save_gb_per_s"], figures["big_rival_save_gb_per_s"]) == pytest.approx((2, 1))
    assert figures["big_step_ratio"] == pytest.approx(2)
    assert figures["big_build_ratio"] == pytest.approx(0.5 / 0.4)
    assert figures["big_ratio_to_torchrec"] == 4


def test_only_the_fastest_setting_of_a_side_counts():
    ours = [setting.name for setting in SETTINGS if setting.trainer == "ours"]
    rows = [
        {"round": 0, "setting": setting.name, "samples_per_s": 6 if setting.name == ours[-1] else 2}
        for setting in SETTINGS
    ]
    assert run.step_ratios(rows) == [3]


def test_whole_experiment_on_made_up_measurements(run_quick, monkeypatch):
    orders = []
    monkeypatch.setattr(run, "measure", lambda point, scratch, order: orders.append(order) or job(1))
    monkeypatch.setattr(run, "launch", lambda setting, workload: {"samples_per_s": 5.0})
    stored = run_quick(run.main, "full_size")
    assert orders == [0]
    assert {row["setting"] for row in stored["rows"] if "setting" in row} == {each.name for each in SETTINGS}
    assert stored["figures"]["big_ratio_to_torchrec"] == 1
