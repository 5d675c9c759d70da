"""The preparation experiment, small."""

import pytest

from experiments import preparation


@pytest.mark.system
@pytest.mark.timeout(180)
def test_quick_run_compares_equal_outputs_and_fills_every_figure(run_quick):
    result = run_quick(preparation.main, "preparation")
    assert result["rows"][0] == {"key": "same output", "rows_compared": 20_000}
    expected = {"ratio_to_torchrec", "ratio_to_polars", "rows_per_s", "peak_memory_bytes"}
    assert set(result["figures"]) >= expected
    assert all(value > 0 for value in result["figures"].values())
