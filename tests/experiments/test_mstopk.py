"""The experiment on the speed of MSTopK."""

import pytest

from experiments import mstopk


@pytest.mark.system
def test_quick_run_fills_every_figure(run_quick):
    stored = run_quick(mstopk.main, "mstopk")
    assert stored["figures"]["mstopk_energy"] == pytest.approx(1)
    for label in ("1m", "10m", "100m"):
        assert stored["figures"][f"mstopk_speedup_{label}"] > 0
    assert len(stored["rows"]) == 3 * 3 * 2
