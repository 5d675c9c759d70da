"""What grows: the arithmetic, and the jobs' sizes."""

import math
from dataclasses import replace

import pytest

from dlrm.launch.device import Ranks
from experiments.checkpointing.job import TrainingJob, training_inputs
from experiments.growth.axes import AXES
from experiments.growth.days import measure_days
from experiments.growth.figures import curve, exponents, figures_of


def row(axis, value, kill_s, *, rival_s=8.0, peak=110):
    phases = {"started": kill_s / 4, "built": kill_s / 8, "restored": kill_s / 8, "stepped": kill_s / 2}
    ours = {
        **{"start": phases, "kill": phases, "node": phases, "step_s": 0.2, "save_bytes": 8e9},
        **{"save_committed_s": 4.0, "peak_bytes": peak, "trained_bytes": 90, "table_bytes": 80},
        "write_s": 0.4,
    }
    rival = {**ours, "kill": {"stepped": rival_s}, "trained_bytes": 100, "step_s": 0.1}
    return {"axis": axis, "value": value, "ours": ours, "rival": rival}


def test_exponents_are_those_of_power_laws():
    assert exponents({1: 3.0, 10: 300.0, 1000: 3e6}) == pytest.approx((2, 2, 2))
    fitted, least, greatest = exponents({1: 1.0, 2: 1.0, 4: 4.0})
    assert (least, greatest) == pytest.approx((0, 2))
    assert 0 < fitted < 2


def test_figures_of_an_axis():
    figures = figures_of([row("rows", 10_000, 2), row("rows", 1000, 0.5)])
    assert figures["growth_exponent_kill_rows"] == pytest.approx(math.log10(4))
    assert figures["growth_exponent_rival_kill_rows"] == pytest.approx(0)
    assert not any("row_save" in name for name in figures), "not measured in these rows"


def test_days_of_data_are_opened_at_the_beginning_and_in_the_middle(tmp_path):
    rows = [measure_days(days, tmp_path / "data") for days in (1, 2)]
    for metric in ("first_batch", "next_batch"):
        assert [*curve(rows, "days", "ours", metric)] == [1, 2]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("ids", [None, 1, 5, 26, 60])
def test_ids_of_a_sample_are_spread_over_the_features(ids):
    job = TrainingJob(rows=50, ids_per_sample=ids, global_batch_size=8, num_batches=1)
    for rank in range(2):
        inputs = training_inputs(job, Ranks(rank=rank, local_rank=rank, world_size=2))
        sparse = next(iter(inputs.loader)).sparse
        lengths = sparse.lengths().view(26, 4)
        assert sparse.values().numel() == lengths.sum() == 4 * (ids or 26)
        assert (lengths == lengths[:, :1]).all()
        assert lengths.max() - lengths.min() <= 1
        assert 0 < sparse.values().min() <= sparse.values().max() < 50


def test_axes_change_what_they_are_named_after():
    small = [point for point in AXES if point.job.global_batch_size * point.job.num_tables < 10_000]
    assert {point.axis for point in small} == {"batch", "tables"}
    wide = next(point for point in AXES if (point.axis, point.value) == ("columns", 256))
    for point in (*small, replace(wide, job=replace(wide.job, global_batch_size=8))):
        inputs = training_inputs(point.job, Ranks(rank=0, local_rank=0, world_size=2))
        found = {
            "tables": len(inputs.manifest.features),
            "columns": inputs.config.model.embedding_dim,
            "batch": 2 * inputs.loader.config.batch_size,
        }
        assert found[point.axis] == point.value
