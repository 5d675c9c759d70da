"""Batches by measured speed: figures of made-up runs, and a real run with a slowed worker."""

import os
from pathlib import Path
from threading import Event

import pytest

from data.synthetic import SyntheticConfig, generate
from experiments.harness.processor_limits import NoControlGroupError, groups
from experiments.uneven import run as uneven
from experiments.uneven.switched import BLOCK_STEPS, added_share


def row(case, number, kind="dynamic", rate=1.0, sizes=(), auc=0.5, fell=None):
    return {
        "case": case,
        "round": number,
        "kind": kind,
        "samples_per_s": rate,
        "began": 100.0,
        "ended": 160.0,
        "sizes": list(sizes),
        "auc": auc,
        "fell": fell,
    }


def test_figures_of_made_up_runs():
    rows = []
    for number in range(2):
        rows += [
            row("slow", number, "even", 50.0, auc=0.7),
            row("slow", number, rate=100.0 + 20 * number, auc=0.71 + 0.002 * number),
            row("equal", number, rate=198.0) | {"added_share": 0.01 * number},
            row("noise", number, sizes=[[110.0, 1000, 1048]] * number),
            row(
                "fall", number, sizes=[[125.0, 1400, 648], [131.0, 1600, 448], [150.0, 1610, 438]], fell=120.0
            ),
        ]
    figures = uneven.figures_of(rows)
    assert (figures["uneven_speedup_4x"], figures["uneven_speedup_4x_high"]) == (2.2, 2.4)
    assert figures["uneven_auc_delta"] == pytest.approx(0.011)
    assert figures["even_cost_share"] == pytest.approx(0.005)
    assert (figures["batch_changes_per_minute_low"], figures["batch_changes_per_minute_high"]) == (0, 1)
    assert figures["follow_s"] == 11.0, "the last change is too small to count"


def test_what_batching_adds_is_told_from_drift():
    """A step takes a little longer each time, and 2 % more with batching."""
    steps = [
        1.0 + 0.001 * number + (0.02 if number // BLOCK_STEPS % 2 else 0.0)
        for number in range(11 * BLOCK_STEPS)
    ]
    times = [sum(steps[:number]) for number in range(len(steps) + 1)]
    assert added_share(times) == pytest.approx(0.02, rel=0.1)


def test_nothing_that_changed_was_followed_at_once():
    assert uneven.follow_s(row("fall", 0, fell=120.0)) == 0


def test_without_the_right_to_make_groups_the_reason_is_given(monkeypatch, capsys):
    monkeypatch.setattr("experiments.harness.processor_limits.FIRST", Path("/proc/none/cpu"))
    with pytest.raises(SystemExit):
        uneven.main(["--quick"])
    assert "cannot be made here" in capsys.readouterr().err


def slow_worker(of_ranks, ended):
    of_ranks[-1].limit(0.5)
    ended.wait()
    return 1.0


@pytest.mark.system
@pytest.mark.timeout(240)
def test_a_slowed_worker_is_a_run_of_its_own(tmp_path):
    try:
        with groups(uneven.WORKERS) as of_ranks:
            folders = [group.folder for group in of_ranks]
            generate(
                SyntheticConfig(scale=0.001, days=uneven.TRAIN_DAYS + 1, rows_per_day=2048 * 12),
                tmp_path / "data",
            )
            found = uneven._run(
                "dynamic",
                0,
                slow_worker,
                data=tmp_path / "data",
                scratch=tmp_path,
                of_ranks=of_ranks,
                steps=48,
                times=tmp_path / "times",
            )
    except NoControlGroupError as error:
        pytest.skip(str(error))
    assert found["samples_per_s"] > 0
    assert 0 < found["auc"] < 1
    assert found["ended"] > found["began"]
    assert found["fell"] == 1.0
    assert -1 < found["added_share"] < 10
    assert not any(folder.exists() for folder in folders)


def test_limits_end_with_their_groups():
    try:
        with groups(1) as (group,):
            group.limit(0.25)
            names = ("cpu.cfs_quota_us", "cpu.max")
            text = next((group.folder / name).read_text() for name in names if (group.folder / name).exists())
            assert text.split()[0] == "5000"
            group.limit(None)
            assert str(os.getpid()) not in (group.folder / "cgroup.procs").read_text().split()
    except NoControlGroupError as error:
        pytest.skip(str(error))
    assert not group.folder.exists()


def test_a_driver_ends_with_its_run():
    ended = Event()
    ended.set()
    assert uneven._slow([_Group()], ended) is None
    assert uneven._noisy([_Group()], ended) is None
    assert uneven._falling([_Group()], ended) > 0


class _Group:
    def limit(self, cores):
        assert cores == uneven.SLOW_CORES
