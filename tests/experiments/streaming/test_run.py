"""The whole experiment, small: runs on a topic and on folders, without kills, which forks would hide."""

import pytest

from data.stream.listing import SETTLE_S
from experiments.streaming.run import main

pytest.importorskip("confluent_kafka")


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_quick_run_measures_all_figures(run_quick, forks):
    stored = run_quick(main, "streaming")
    figures = stored["figures"]
    assert None not in figures.values()
    assert figures["stream_lost_records"] == figures["stream_repeated_records"] == 0
    assert figures["stream_kills"] == 0
    assert figures["stream_unaccounted_records"] == 0
    assert figures["stream_lag_s"] > 0
    assert figures["stream_folder_lag_s"] >= SETTLE_S
    assert figures["stream_max_samples_per_s"] > 0
    (limited,) = (row for row in stored["rows"] if row["case"] == "limited")
    assert limited["left_out"] > 0
    assert limited["bad"] == 0
