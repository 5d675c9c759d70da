"""The experiment on exchanges of dense gradients: contenders, figures, and a small real run."""

import json
import math
import runpy
import signal
import sys
from itertools import count

import psutil
import pytest

from dlrm.comm import cost
from experiments.communication import run as communication
from experiments.communication.contenders import (
    CHOSEN,
    CONTENDERS,
    LIMIT,
    SHARED_ROUNDS,
    STEPPED,
    TRAINED,
    is_comparable,
    is_lossless,
    still_in,
)
from experiments.communication.figures import (
    Cell,
    NodeLayout,
    TrainingCurve,
    figures_of,
    time_ratio,
)
from experiments.communication.run import QUICK
from experiments.communication.whole import decisions_of
from experiments.communication.winners import MEASURED_MS, _num_bytes, table_vi_hits
from experiments.harness.workers import Workers
from tests.experiments.harness.namespaces import own_namespaces
from tests.programs import at_work

STEPS = {"nothing": 0.1, "ddp": 9.0, "dense": 1.0, "tree": 1.02, "ring_fp16": 1.3, "ring_int8": 1.6}
"""Seconds of a step."""
SPEEDS = (1.0, 2.0, 4.0, 8.0)
"""Relative speed of the machine in each round."""


def cell(chosen="dense", model="tiny", gbit_per_s=1.0, rounds=None, **seconds):
    """A cell of contenders with these step times, on a machine whose speed varies."""
    rounds = rounds or [{name: each * speed for name, each in seconds.items()} for speed in SPEEDS]
    return Cell(
        model=model,
        layout=NodeLayout(workers=2),
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
    return TrainingCurve(contender=contender, seed=seed, curve=curve, decisions=decisions)


def test_best_contender_is_one_that_sends_as_much_as_auto_must():
    measured = cell(ddp=1.0, dense=0.8, ring_int8=0.5, nothing=0.01, power_sgd=0.1, **{"star_0.001": 0.1})
    assert measured.best == "ring_int8"
    assert measured.auto_ratio.value == pytest.approx(0.5 / 0.8)
    assert measured.share.value == pytest.approx(0.99)
    comparable = {name for name in CONTENDERS if is_comparable(name)}
    assert comparable >= {"ddp", "ddp_fp16", "tree", "ring_int8", "priority", "all_gather_0.1", "var_0.01"}
    assert not comparable & {"nothing", "power_sgd", "hi_topk_0.001", "selsync", "gravac", "pareto", "auto"}


LUCK = STEPS | {"ring_int8": 1.0}
LOSSY = STEPS | {"power_sgd": 0.5, "star_0.001": 0.51, "all_gather_0.001": 0.7}
LATER = STEPS | {"power_sgd": 0.5, "ddp_fp16": 1.01}
FEW = {name: STEPS[name] for name in ("nothing", "ddp", "dense")}


@pytest.mark.parametrize(
    ("rounds", "chosen", "stays", "leaves"),
    [
        ([STEPS] * 3, "dense", {"nothing", "ddp", "dense", "tree"}, {"ring_fp16", "ring_int8"}),
        ([STEPS], "dense", {"ring_fp16"}, {"ring_int8"}),  # one round may have been bad luck
        ([STEPS] * 3, "ring_int8", {"ring_int8", "dense"}, {"ring_fp16"}),
        ([STEPS, STEPS, LUCK], "dense", {"ring_int8"}, {"ring_fp16"}),
        # those that are not comparable must be close to the best of all
        ([LOSSY] * 3, "dense", {"power_sgd", "star_0.001", "dense", "tree"}, {"all_gather_0.001"}),
        ([LATER] * (SHARED_ROUNDS - 1), "ring_int8", {"power_sgd"}, {"ring_fp16"}),
        ([LATER] * SHARED_ROUNDS, "ring_int8", {"ddp_fp16", "ring_int8"}, {"power_sgd", "ddp", "nothing"}),
        ([STEPS] * 3 + [FEW], "dense", {"ddp", "dense", "nothing"}, {"tree"}),  # it had left
    ],
)
def test_contenders_close_to_the_best_continue(rounds, chosen, stays, leaves):
    found = {*still_in(rounds, chosen)}
    assert stays <= found
    assert not leaves & found


def test_every_choice_of_auto_is_comparable():
    assert all(is_comparable(name) for name in CHOSEN.values())
    assert {name for name in CHOSEN.values() if is_lossless(name)} == {"dense", "tree", "two_level"}
    assert {name for name in CONTENDERS if is_lossless(name)} > {"ddp", "priority"}
    assert {*TRAINED} <= {*CONTENDERS}


def test_ratio_uses_the_rounds_with_both_contenders():
    rounds = [{"ddp": 2.0, "dense": 1.0, "tree": 9.0}] * 2 + [{"ddp": 3.0, "dense": 1.0}] * 4
    measured = cell(rounds=rounds)
    assert measured.ratio("dense", "ddp").value == 3.0
    assert measured.speedups()["tree"] == pytest.approx(2 / 9)
    assert measured.ratio("dense", "dense") == measured.auto_ratio
    with pytest.raises(ValueError, match="2 rounds has no interval"):
        measured.ratio("tree", "ddp")


def test_contender_that_wins_by_luck_is_not_the_best():
    rounds = [{"ddp": 1.0, "dense": 1.0, "tree": 1.0 + 0.1 * (-1) ** (number + 1)} for number in range(8)]
    measured = cell(rounds=rounds)  # tree wins every other round and loses the others
    assert measured.auto_ratio.value == pytest.approx(1.05)
    assert measured.auto_ratio.low == 1.0


def test_later_rounds_count_for_comparable_contenders_alone():
    shared = {"ddp": 2.0, "dense": 1.0, "tree": 1.02, "nothing": 0.1, "star_0.001": 0.8}
    measured = cell(rounds=[shared] * 4 + [{"dense": 1.0, "tree": 0.9}] * 12)
    assert measured.best == "tree"
    assert measured.auto_ratio.value == pytest.approx(0.9)
    assert measured.best_of_all == "star_0.001"
    assert measured.whole_table_ratio.value == pytest.approx(0.8)
    assert measured.speedups()["tree"] == pytest.approx(2 / 1.02)


def test_time_to_a_target_is_interpolated_between_evaluations():
    baseline = training("ddp", 0, [0.6, 0.7, 0.75, 0.76])  # target 0.75, after 3 s
    assert baseline.seconds_to(0.65) == pytest.approx(1.5)
    assert baseline.seconds_to(0.55) == pytest.approx(0.5)
    assert math.isinf(baseline.seconds_to(0.77))
    assert time_ratio(baseline, training("auto", 0, [0.6, 0.7, 0.75, 0.76], step_s=0.5)) == pytest.approx(2)
    assert time_ratio(baseline, training("auto", 0, [0.5, 0.65, 0.7, 0.8], step_s=0.5)) == pytest.approx(
        3 / 1.75
    )
    assert time_ratio(baseline, training("auto", 0, [0.5, 0.5, 0.5, 0.5])) == 0


def test_decisions_of_auto_are_recorded_with_their_steps():
    chosen = [None, "tree fp32", "tree fp32", None, "ring int8"]  # with a second trial
    assert decisions_of(chosen) == [(2, "tree fp32"), (5, "ring int8")]


def test_formulas_name_all_winners_of_table_vi(monkeypatch):
    assert table_vi_hits() == 36
    found = [_num_bytes(each[0][0][0]) for each in MEASURED_MS.values()]
    assert [each / 1e6 for each in found] == pytest.approx([45.5, 100.1, 240.0, 526.6], abs=0.06)
    monkeypatch.setattr(cost, "broadcast_s", lambda *_: 0.0)
    assert table_vi_hits() < 36


def interrupt_second_row(monkeypatch):
    """Has SIGTERM arrive while workers are busy with the second row; returns a list that takes them then."""
    answer, rows, busy = Workers._answer, count(1), []

    def interrupted(workers):
        if next(rows) == 2:
            busy.extend(psutil.Process(at_work(each.pid)) for each in workers._processes)
            signal.raise_signal(signal.SIGTERM)
        return answer(workers)

    monkeypatch.setattr(Workers, "_answer", interrupted)
    return busy


@pytest.fixture
def _own_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("links", "forks", "_own_sigterm")
def test_quick_run_continues_after_an_interrupt_and_counts_the_bytes_of_the_formulas(
    run_quick, tmp_path, monkeypatch
):
    busy = interrupt_second_row(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["communication", "--quick"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("experiments.communication", run_name="__main__")
    assert ended.value.code == 1
    assert len(busy) == 2
    assert not psutil.wait_procs(busy, timeout=10)[1]
    assert not own_namespaces()
    stored = json.loads((tmp_path / "runs" / "quick" / "communication.json").read_text())
    assert stored["finished"] is None

    result = run_quick(communication.main, "communication")
    figures, rows = result["figures"], result["rows"]
    assert [rows[0]] == stored["rows"]
    assert figures == figures_of(rows)[0]
    assert figures["auto_worst_ratio_low"] <= figures["auto_worst_ratio"] <= figures["auto_worst_ratio_high"]
    assert {"auc_delta_auto_ci", "table_vi_hits", "dense_share_tiny_2_workers_1gbps"} <= {*figures}
    assert {row["contender"] for row in rows if "curve" in row} == {*QUICK.trained}
    (row,) = [row for row in rows if "chosen" in row]
    counted = row["link_bytes"]
    assert counted.keys() == {*STEPPED}
    for name, expected in row["formula_bytes"].items():
        # headers and acknowledgements, and a barrier for each turn
        assert expected <= counted[name] <= 1.1 * expected + 5000, name
    assert counted[LIMIT] < 2000
    assert counted["ddp"] == pytest.approx(counted["dense"], rel=0.02)
    assert counted["ddp_fp16"] < 0.55 * counted["ddp"]
    assert (tmp_path / "runs" / "quick" / "communication_training.png").stat().st_size
    assert not own_namespaces()
