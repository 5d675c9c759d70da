"""The experiment of what exchanges of dense gradients are worth: who competes, figures, and that it runs."""

import json
import math
import os
import signal
import subprocess
import sys

import psutil
import pytest

from dlrm.launch.device import Ranks
from experiments.communication import run as communication
from experiments.communication.contenders import (
    BASELINE,
    CHOSEN,
    CONTENDERS,
    LEVELS,
    LIMIT,
    TRAINED,
    is_comparable,
    is_lossless,
    stepped,
)
from experiments.communication.figures import (
    Cell,
    Layout,
    Training,
    figures_of,
    notes_of,
    share_of,
    step_figures,
    time_ratio,
    training_figures,
)
from experiments.communication.models import MODELS, DensePart, num_dense, samples
from experiments.communication.picture import draw_steps, draw_trainings
from experiments.communication.tasks import QUICK, Scope, tasks
from experiments.communication.whole import Watched
from experiments.harness import network
from experiments.harness.launch import worker_environment
from tests.experiments.harness.namespaces import namespaces, own_namespaces

SPEEDS = (1.0, 2.0, 4.0, 8.0)
"""Of a machine, by round."""


def cell(chosen="dense", model="tiny", gbit_per_s=1.0, rounds=None, **seconds):
    """Contenders that take so long, on a machine whose speed changes from round to round."""
    rounds = rounds or [{name: each * speed for name, each in seconds.items()} for speed in SPEEDS]
    return Cell(
        model=model,
        layout=Layout(workers=2),
        gbit_per_s=gbit_per_s,
        rounds=rounds,
        link_bytes=dict.fromkeys(rounds[0], 1.0),
        chosen=chosen,
    )


def training(contender, seed, aucs, step_s=1.0, decisions=()):
    curve = [
        {"samples": 100 * place, "seconds": step_s * place, "auc": auc}
        for place, auc in enumerate(aucs, start=1)
    ]
    return Training(contender=contender, seed=seed, curve=curve, decisions=decisions)


def test_the_best_is_sought_among_those_that_leave_no_more_behind():
    measured = cell(ddp=1.0, dense=0.8, ring_int8=0.5, nothing=0.01, power_sgd=0.1, **{"star_0.001": 0.1})
    assert measured.best == "ring_int8"
    assert measured.auto_ratio.value == pytest.approx(0.5 / 0.8)
    assert measured.share.value == pytest.approx(0.99)
    comparable = {name for name in CONTENDERS if is_comparable(name)}
    assert comparable >= {"ddp", "ddp_fp16", "tree", "ring_int8", "priority", "all_gather_0.1", "var_0.01"}
    assert not comparable & {"nothing", "power_sgd", "hi_topk_0.001", "selsync", "gravac", "pareto", "auto"}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(("workers", "per_node"), [(2, 1), (4, 1), (4, 2)])
def test_every_cell_has_what_figures_are_relative_to(is_large, workers, per_node):
    names = stepped(is_large=is_large, num_workers=workers, per_node=per_node)
    assert {BASELINE, LIMIT, "dense", "all_gather_0.01"} <= {*names} <= {*CONTENDERS}
    assert len({*names}) == len(names)
    assert ("hi_topk_0.01" in names) == (per_node > 1)
    possible = {*CHOSEN.values()} - ({*LEVELS} if per_node == 1 else set())
    assert is_large or possible <= {*names}


def test_what_auto_may_choose_is_comparable():
    assert all(is_comparable(name) for name in CHOSEN.values())
    assert {name for name in CHOSEN.values() if is_lossless(name)} == {"dense", "tree", "two_level"}
    assert {name for name in CONTENDERS if is_lossless(name)} > {"ddp", "priority"}
    assert {*TRAINED} <= {*CONTENDERS}


def test_a_ratio_is_of_rounds_that_have_both():
    rounds = [{"ddp": 2.0, "dense": 1.0, "tree": 9.0}] * 2 + [{"ddp": 3.0, "dense": 1.0}] * 4
    measured = cell(rounds=rounds)
    assert measured.ratio("dense", "ddp").value == 3.0
    assert measured.speedups()["tree"] == pytest.approx(2 / 9)
    assert measured.ratio("dense", "dense") == measured.auto_ratio
    with pytest.raises(ValueError, match="2 rounds has no interval"):
        measured.ratio("tree", "ddp")


def test_who_is_best_by_luck_is_found_out():
    rounds = [{"ddp": 1.0, "dense": 1.0, "tree": 1.0 + 0.1 * (-1) ** (number + 1)} for number in range(8)]
    measured = cell(rounds=rounds)  # tree wins every other round, and loses those between
    # where it won, something else seems best: ddp, as fast as dense; where it lost, it is compared
    assert measured.auto_ratio.value == pytest.approx(1.05)
    assert measured.auto_ratio.low == 1.0


def test_no_round_is_lost_on_finding_the_best():
    rounds = [{"ddp": 2.0, "dense": 1.0, "tree": 0.9 - 0.01 * number} for number in range(8)]
    ratio = cell(rounds=rounds).auto_ratio
    assert ratio.value == pytest.approx(0.9 - 0.035)
    assert ratio.low < 0.9 - 0.05 < 0.9 - 0.02 < ratio.high  # of all eight


def test_what_was_left_out_is_not_the_best():
    rounds = [{"ddp": 1.0, "dense": 1.0, "tree": 0.5}] + [{"ddp": 1.0, "dense": 0.9}] * 7
    assert cell(rounds=rounds).best == "dense"


def test_the_whole_table_has_those_that_leave_more_behind():
    measured = cell(ddp=1.0, dense=0.8, nothing=0.1, power_sgd=0.5, **{"star_0.001": 0.4})
    assert measured.best_of_all == "star_0.001"
    assert measured.whole_table_ratio.value == pytest.approx(0.5)
    assert measured.auto_ratio.value == 1


def test_rounds_of_comparable_ones_alone_count_for_them_and_for_nobody_else():
    shared = {"ddp": 2.0, "dense": 1.0, "tree": 1.02, "nothing": 0.1, "star_0.001": 0.8}
    measured = cell(rounds=[shared] * 4 + [{"dense": 1.0, "tree": 0.9}] * 12)
    assert measured.best == "tree"
    assert measured.auto_ratio.value == pytest.approx(0.9)
    assert measured.best_of_all == "star_0.001"
    assert measured.whole_table_ratio.value == pytest.approx(0.8)
    assert measured.speedups()["tree"] == pytest.approx(2 / 1.02)


def test_figures_of_steps():
    wide = {"model": "wide", "chosen": "all_gather_0.01", "ddp": 3.0, "dense": 2.5, "nothing": 1.0}
    cells = [
        cell(chosen="dense", ddp=1.0, dense=1.0, tree=0.9, nothing=0.98),
        cell(**wide, **{"all_gather_0.01": 1.5}),
        cell(**wide, **{"all_gather_0.01": 0.1}, gbit_per_s=5.0),
    ]
    figures = step_figures(cells)
    assert figures["auto_worst_ratio"] == pytest.approx(0.9)
    assert figures["auto_best_share"] == pytest.approx(2 / 3)
    assert figures["auto_worst_ratio_whole_table"] == pytest.approx(0.9)
    assert figures["auto_lossless_share"] == pytest.approx(1 / 3)
    assert figures["auto_lossless_share_where_small"] == 1
    assert figures["bytes_share_all_gather_0_01"] == 1
    assert not {"bytes_share_ddp", "bytes_share_nothing"} & {*figures}
    assert figures["wide_1gbps_speedup"] == figures["wide_1gbps_speedup_2_workers"] == pytest.approx(2)
    assert figures["dense_share_wide_2_workers_1gbps"] == pytest.approx(2 / 3)
    trained = [training("auto", 0, [0.6], decisions=[(191, "ring fp32")]), training("auto", 1, [0.6])]
    notes = notes_of(cells, trained, {"time_to_auc_speedup_x": None})
    assert notes["auto_lossless_share_where_small"] == "1 of 3 cells are such"
    assert notes["auto_decided_at_step"] == "ring fp32 from step 191 on; not decided"
    assert notes["auto_worst_ratio"] == "tiny, 2 workers, 1 Gb/s: it chose dense, and tree was best"
    assert (
        notes["auto_best_share"] == "clearly not the best: tiny, 2 workers, 1 Gb/s: dense where tree was best"
    )
    assert "reached the target" in notes["time_to_auc_speedup_x"]


def test_time_to_a_target_is_read_between_evaluations():
    baseline = training("ddp", 0, [0.6, 0.7, 0.75, 0.76])  # target 0.75, after 3 s
    assert baseline.seconds_to(0.65) == pytest.approx(1.5)
    assert baseline.seconds_to(0.55) == pytest.approx(0.5)
    assert math.isinf(baseline.seconds_to(0.77))
    assert time_ratio(baseline, training("auto", 0, [0.6, 0.7, 0.75, 0.76], step_s=0.5)) == pytest.approx(2)
    assert time_ratio(baseline, training("auto", 0, [0.5, 0.65, 0.7, 0.8], step_s=0.5)) == pytest.approx(
        3 / 1.75
    )
    assert time_ratio(baseline, training("auto", 0, [0.5, 0.5, 0.5, 0.5])) == 0


def test_figures_of_trainings_are_differences_within_a_seed():
    trainings = [
        *(training("ddp", seed, [0.6, 0.7, 0.75, 0.76 + seed / 100]) for seed in (0, 1)),
        *(
            training("auto", seed, [0.6, 0.7, 0.75, 0.755 + seed / 100], 0.5, [(131 + seed, "tree fp32")])
            for seed in (0, 1)
        ),
        *(training("power_sgd", seed, [0.6, 0.6, 0.6, 0.6]) for seed in (0, 1)),
    ]
    figures = training_figures(trainings)
    assert figures["auc_delta_auto"] == pytest.approx(-0.005)
    assert figures["auc_delta_auto_ci"] == pytest.approx(0, abs=1e-9)
    assert figures["time_to_auc_speedup_auto"] == pytest.approx(2)
    assert figures["time_to_auc_speedup_power_sgd"] is figures["time_to_auc_speedup_power_sgd_ci"] is None
    assert figures["auto_decided_at_step"] == 132
    assert "auc_delta_ddp" not in figures


def test_the_share_is_what_goes_without_an_exchange():
    row = {"rounds": [{"dense": 2.0 * speed, "nothing": 1.5 * speed} for speed in SPEEDS]}
    assert share_of(row).value == pytest.approx(0.25)


def test_it_is_noted_when_auto_decides():
    class Replicas:
        chosen = None

        def updated(self, seconds):
            assert seconds == 0.5

    watched = Watched(Replicas())
    for chosen in (None, "tree fp32", "tree fp32", None, "ring int8"):  # with a second trial
        watched.replicas.chosen = chosen
        watched.updated(0.5)
    assert watched.decisions == [(2, "tree fp32"), (5, "ring int8")]


def test_models_have_the_sizes_that_are_said():
    sizes = {name: num_dense(DensePart(MODELS[name])) for name in ("tiny", "terabyte")}
    assert sizes["tiny"] < 100_000 < sizes["terabyte"] < 1_000_000
    *_, first, second, third, last = MODELS["wide"].config.model.top_mlp
    assert (first, second, third, last) == (4096, 4096, 4096, 1)
    assert 50e6 < 3 * 4096**2 + 4096 * (64 + 27 * 26 // 2) < 53e6


@pytest.mark.parametrize(("model", "size"), [("tiny", 256), ("kaggle", 32), ("mlperf", 32)])
def test_ranks_have_batches_of_their_own_that_fit_the_model(model, size):
    shape = MODELS[model]
    first, other = (samples(shape, Ranks(rank, 0, 4))[0] for rank in (0, 1))
    assert first.dense.shape == other.dense.shape == (size, 13)
    assert not first.pooled.equal(other.pooled)
    assert DensePart(shape)(first.dense, first.pooled).shape == first.labels.shape


def test_every_row_has_a_key_of_its_own():
    scope = Scope()
    keys = [task.key for layout in scope.layouts for task in tasks(scope, layout)]
    assert len(keys) == len({*keys})
    assert "steps wide 4 workers in nodes of 2 1 Gb/s" in keys
    assert "steps kaggle 2 workers 1 Gb/s" in keys
    left_out = {
        "steps wide 4 workers 1 Gb/s",
        "steps wide 2 workers unthrottled",
        "steps mlperf 4 workers 1 Gb/s",
    }
    assert not left_out & {*keys}  # for time
    assert sum(key.startswith("train ") for key in keys) == len(TRAINED) * len(scope.seeds)


def test_without_root_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(network.shutil, "which", lambda command: command)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert communication.main(["--quick"]) == 1
    assert "take root" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_pictures_are_drawn_of_whatever_is_there(tmp_path):
    cells = [cell(ddp=1.0, dense=0.8, nothing=0.5), cell(model="wide", gbit_per_s=None, ddp=1.0, dense=2.0)]
    trainings = [training(name, seed, [0.6, 0.7, 0.8]) for name in ("ddp", "auto") for seed in (0, 1)]
    draw_steps(cells, tmp_path / "steps.png")
    draw_trainings(trainings, training_figures(trainings), "here", tmp_path / "trainings.png")
    assert all((tmp_path / name).stat().st_size for name in ("steps.png", "trainings.png"))


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("links")
def test_the_command_runs_and_counts_what_the_formulas_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert communication.main(["--quick"]) == 0
    result = json.loads((tmp_path / "runs" / "quick" / "communication.json").read_text())
    figures, rows = result["figures"], result["rows"]
    assert figures == figures_of(rows)
    assert figures["auto_worst_ratio_low"] <= figures["auto_worst_ratio"] <= figures["auto_worst_ratio_high"]
    assert {"auc_delta_auto_ci", "table_vi_hits", "dense_share_tiny_2_workers_1gbps"} <= {*figures}
    assert {row["contender"] for row in rows if "curve" in row} == {*QUICK.trained}
    steps = [row for row in rows if "chosen" in row]
    assert len(steps) == len(QUICK.links_gbit_per_s)
    for row in steps:
        counted = row["link_bytes"]
        for name, expected in row["formula_bytes"].items():
            # headers and acknowledgements, and a barrier for each turn
            assert expected <= counted[name] <= 1.1 * expected + 5000, (row["key"], name)
        assert counted[LIMIT] < 2000
        assert counted["ddp"] == pytest.approx(counted["dense"], rel=0.02)
        assert counted["ddp_fp16"] < 0.55 * counted["ddp"]
    assert all(
        (tmp_path / "runs" / "quick" / f"communication{end}.png").stat().st_size for end in ("", "_training")
    )
    assert not own_namespaces()


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("links")
def test_interrupted_it_leaves_nothing_behind_at_once_and_keeps_its_rows(tmp_path):
    command = [sys.executable, "-m", "experiments.communication", "--quick"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=worker_environment(1), stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout.readline().startswith("[1/")  # and workers are busy with the next row
        workers = psutil.Process(running.pid).children()
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 1
    finally:
        running.kill()
        running.communicate()
    assert workers
    # one that has ended stays as a zombie until init takes notice
    assert not [each for each in workers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not [name for name in namespaces() if f"-{running.pid}-" in name]
    result = json.loads((tmp_path / "runs" / "quick" / "communication.json").read_text())
    assert len(result["rows"]) == 1
    assert result["finished"] is None
