"""The preparation experiment, small."""

import json

import pytest

from experiments.preparation import run as preparation


@pytest.mark.system
@pytest.mark.timeout(180)
def test_it_compares_the_same_output_and_fills_every_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert preparation.main(["--quick"]) == 0
    result = json.loads((tmp_path / "runs" / "quick" / "preparation.json").read_text())
    assert result["rows"][0] == {"key": "same output", "rows_compared": 20_000}
    expected = {"ratio_to_torchrec", "ratio_to_polars", "rows_per_s", "peak_memory_bytes"}
    assert set(result["figures"]) >= expected
    assert all(value > 0 for value in result["figures"].values())
    assert (tmp_path / "runs" / "quick" / "preparation.png").stat().st_size > 0
