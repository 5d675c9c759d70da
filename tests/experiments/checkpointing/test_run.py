"""The checkpointing experiment: figures of made-up rows, and a small real run."""

import json
from contextlib import nullcontext

import pytest

from experiments.checkpointing import run as checkpointing
from experiments.checkpointing.run import figures_of, main

SAVED = {
    "blocked_s": 2.0, "committed_s": 2.0, "wall_s": 2.0, "steps": 0, "undisturbed_step_s": 0.1, "lost_s": 2.0,
    "after_s": 0.0, "lost_after_s": 0.0, "bytes": 1000, "extra_bytes": 10,
}  # fmt: skip
SAVERS = {
    "dcp save": SAVED,
    "dcp async": SAVED | {"blocked_s": 0.2, "committed_s": 6.0, "lost_s": 4.0, "extra_bytes": 2000},
    "torch.save": SAVED,
    "raw": SAVED | {"committed_s": 1.0, "bytes": 900},
    "ours rolling": SAVED
    | {"blocked_s": 0.2, "committed_s": 2.9, "wall_s": 3.0, "steps": 24, "lost_s": 0.6, "extra_bytes": 500}
    | {"after_s": 2.0, "lost_after_s": 0.4},
    "ours consistent": SAVED | {"blocked_s": 0.3, "lost_s": 1.0, "extra_bytes": 1300},
    "ours rows": SAVED | {"blocked_s": 0.05, "bytes": 140},
    "ours waiting": SAVED | {"committed_s": 1.25},
}
LOADS = {"dcp cold": 1.2, "dcp warm": 0.3, "ours cold": 1.0, "ours warm": 0.6}


def rows_of(*rounds):
    alone = {"key": "memory", "savers": SAVERS}
    return [
        alone,
        *({"key": f"round {n}", "round": n, "loads": LOADS, "savers": s} for n, s in enumerate(rounds)),
    ]


def test_figures_are_ratios_of_cpr_to_the_others():
    figures = figures_of(rows_of(SAVERS))
    expected = {
        "blocked_ratio_rolling": 0.1,
        "blocked_ratio_consistent": 0.15,
        "lost_ratio_to_dcp_async": 0.15,
        "lost_ratio_to_dcp_async_consistent": 0.25,
        "lost_ratio_to_dcp_async_with_clearing": 0.25,
        "save_ratio_to_dcp": 1.6,  # bytes/s, to the commit
        "save_ratio_to_raw": (1000 / 1.25) / 900,
        "load_ratio_to_dcp": 1.2,  # more is faster, as for saving
        "load_ratio_to_dcp_warm": 0.5,
        "row_save_blocked_share": 0.25,
        "row_save_bytes_share": 0.14,
        "throughput_while_saving": 0.8,  # 24 steps in 3 s instead of 30
    }
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value), name
    assert figures["peak_extra_bytes"] == 500
    assert figures["peak_extra_bytes_consistent"] == 1300
    assert figures["peak_extra_bytes_dcp_async"] == 2000


def test_ratios_are_taken_within_rounds_with_their_extremes():
    def slowed(factor):
        """A round in which everything takes longer, for both sides."""
        return {
            name: saved
            | {"blocked_s": saved["blocked_s"] * factor, "committed_s": saved["committed_s"] * factor}
            for name, saved in SAVERS.items()
        }

    unlucky = SAVERS | {"ours rolling": SAVERS["ours rolling"] | {"blocked_s": 1.0}}
    figures = figures_of(rows_of(SAVERS, slowed(7), unlucky))
    assert figures["blocked_ratio_rolling"] == pytest.approx(0.1)
    assert figures["blocked_ratio_rolling_low"] == pytest.approx(0.1)
    assert figures["blocked_ratio_rolling_high"] == pytest.approx(0.5)
    assert figures["save_ratio_to_dcp_low"] == figures["save_ratio_to_dcp_high"] == pytest.approx(1.6)


def test_interrupted_run_measures_only_missing_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    class MadeUpWorkers(nullcontext):
        def __init__(self, *_, **__):
            super().__init__(self)
            (tmp_path / "runs/quick/checkpointing/left behind").write_text("x")

        def ask(self, **request):
            asked.append(request)
            if len(asked) == 2:
                raise KeyboardInterrupt
            return {name: value for name, value in rows_of(SAVERS)[len(request)].items() if name != "key"}

    monkeypatch.setattr(checkpointing, "Workers", MadeUpWorkers)
    with pytest.raises(KeyboardInterrupt):
        main(["--quick"])
    assert main(["--quick"]) == 0
    assert asked == [{}, {"round": 0}, {"round": 0}]
    assert not (tmp_path / "runs/quick/checkpointing").exists()
    stored = json.loads((tmp_path / "runs/quick/checkpointing.json").read_text())
    assert stored["finished"]
    assert stored["figures"]["blocked_ratio_rolling"] == pytest.approx(0.1)
    assert (tmp_path / "runs/quick/checkpointing.png").stat().st_size > 10_000


@pytest.mark.system
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("forks")
def test_quick_run_with_two_workers(run_quick, tmp_path):
    stored = run_quick(main, "checkpointing")
    assert [row["key"] for row in stored["rows"]] == ["memory", "round 0"]
    saved = stored["rows"][1]["savers"]
    assert set(saved) == set(SAVERS)
    tables_bytes = 26 * 4000 * (64 + 1) * 4
    assert saved["raw"]["bytes"] == tables_bytes
    for name in ("dcp save", "dcp async", "torch.save", "ours rolling", "ours consistent", "ours waiting"):
        assert tables_bytes < saved[name]["bytes"] < 1.3 * tables_bytes, name  # the network adds a little
    assert stored["figures"]["row_save_bytes_share"] < 0.3
    assert sorted(stored["rows"][1]["loads"]) == sorted(LOADS)
    assert not (tmp_path / "runs/quick/checkpointing").exists()
