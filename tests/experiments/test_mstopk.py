"""The experiment on the speed of MSTopK."""

import pytest

from experiments import mstopk


def row(size, topk_s, mstopk_s, energy=1.0):
    return {
        "size": size,
        "kind": "normal",
        "share": 0.01,
        "topk_s": topk_s,
        "mstopk_s": mstopk_s,
        "energy": energy,
    }


def test_figures_are_those_of_the_slowest_vectors():
    rows = [
        row("10m", [4.0, 8.0, 6.0], [1.0, 1.0, 1.0]),
        row("10m", [4.0, 9.0, 20.0], [2.0, 3.0, 2.0], energy=0.995),
        row("100m", [3.0], [0.5]),
    ]
    assert mstopk.figures_of(rows) == {
        "mstopk_speedup_10m": 3,
        "mstopk_speedup_10m_low": 2,
        "mstopk_speedup_10m_high": 10,
        "mstopk_speedup_100m": 6,
        "mstopk_speedup_100m_low": 6,
        "mstopk_speedup_100m_high": 6,
        "mstopk_energy": 0.995,
    }


@pytest.mark.system
def test_quick_run_fills_every_figure(run_quick):
    stored = run_quick(mstopk.main, "mstopk")
    assert stored["figures"]["mstopk_energy"] == pytest.approx(1)
    for label in ("1m", "10m", "100m"):
        assert stored["figures"][f"mstopk_speedup_{label}"] > 0
    assert len(stored["rows"]) == 3 * 3 * 2
