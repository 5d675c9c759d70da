"""The experiment on operator splitting: figures, formulas, and a small real run."""

import os
from dataclasses import asdict, replace
from statistics import mean

import numpy as np
import pytest

from dlrm.launch.device import Ranks
from dlrm.sharding.splitting import costs
from experiments.harness import network, record
from experiments.harness.network import Network
from experiments.harness.workers import Workers
from experiments.splitting import run as splitting
from experiments.splitting.figures import PlanCell, time_figures
from experiments.splitting.run import check, formulas, replicated_bytes, unique_rows
from experiments.splitting.workload import BAGS, MODELS, TerabyteWorkload
from tests.experiments.harness.namespaces import own_namespaces

SMALL = TerabyteWorkload(max_rows=500, global_batch_size=64, num_batches=2)
ALL_STEADY = (1.0,) * 20
"""Relative speed of the machine in 20 rounds."""


def cell(torchrec, des, auto, strategies=("split",), speeds=ALL_STEADY, model="lr"):
    """A cell of contenders with these step times, on a machine whose speed varies."""
    rounds = [
        {"torchrec": torchrec * speed, "des": des_s * speed, "auto": auto * speed}
        for des_s, speed in zip(des, speeds, strict=True)
    ]
    chosen = {f"head {place}": strategy for place, strategy in enumerate(strategies)}
    return PlanCell(model=model, workers=2, gbit_per_s=1.0, rounds=rounds, chosen=chosen)


def steady(seconds):
    return [seconds] * len(ALL_STEADY)


def shaky(share):
    """Seconds that alternate around 1."""
    return [1 - share, 1 + share] * (len(ALL_STEADY) // 2)


WINS = cell(1.0, steady(0.5), 0.5)
LOSES = cell(1.0, steady(2.0), 2.0)
TIES = cell(1.0, shaky(0.02), 1.0)
OPEN = cell(1.0, shaky(0.2), 1.0)


def test_ratios_are_taken_within_rounds():
    uneven = cell(1.0, steady(0.5), 0.625, speeds=tuple(np.linspace(1, 30, 20)))
    ratio = uneven.ratio("des", "torchrec")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    assert uneven.better == "des"
    assert uneven.auto_ratio.value == 1  # it is that plan
    mixed = replace(uneven, chosen={"wide": "split", "sparse": "exchange"})
    assert mixed.auto_ratio.value == pytest.approx(0.8)
    wrong = replace(uneven, chosen={"wide": "exchange"})
    assert wrong.auto_ratio.value == pytest.approx(0.5)


def test_hits_misses_and_ties():
    figures, _ = time_figures([WINS, LOSES, TIES, OPEN, replace(LOSES, chosen={"head": "exchange"})])
    assert figures["planner_hits_share"] == 3 / 5
    assert figures["planner_firm_hits_share"] == 2 / 5
    assert figures["ties_share"] == figures["open_share"] == 1 / 5
    assert figures["best_throughput_ratio"] == pytest.approx(2)
    assert figures["auto_worst_ratio"] == pytest.approx(0.5)


def test_mixture_is_compared_with_the_better_plan():
    mixed = cell(1.0, steady(2.0), 0.9, strategies=("split", "exchange"))
    assert mixed.plan is None
    for chosen in (mixed.chosen, {"head": "rows"}):
        figures, _ = time_figures([replace(mixed, chosen=chosen)])
        assert figures["planner_firm_hits_share"] == 1


@pytest.mark.parametrize("model", MODELS)
def test_id_bytes_by_formula(model):
    """Each of 4 ranks sends 3/4 of its ids and lengths per head, or all of them if columns are split."""
    found = formulas(model, 4, SMALL)["id_bytes"]
    heads = {"lr": 1, "dlrm": 1, "dcn": 1}.get(model, 2)
    for bags, num_ids in (("multi_hot", 214), ("one_hot", 26)):
        once = 16 * (num_ids + 26) * 8 * 3 / 4
        assert found[bags]["all_to_all"] == pytest.approx(heads * once)
        assert found[bags]["split"] == pytest.approx((4 if model == "dlrm" else heads) * once)


def test_pulled_and_pushed_bytes_are_those_of_hashed_rows():
    """With row `key` on rank `key % 4`, keys and rows cross twice, within 2 %, as hashed rows are uneven."""
    workload = replace(SMALL, global_batch_size=1024)
    for bags in BAGS:
        parts = [
            np.concatenate(workload.keys(number, bags, Ranks(rank, rank, 4)))
            for number in range(workload.num_batches)
            for rank in range(4)
        ]
        sent = [(8 + 2 * 64 * 4) * sum(keys % 4 != place % 4) for place, keys in enumerate(parts)]
        rows = unique_rows(workload, bags, 4)
        assert mean(sent) == pytest.approx(costs.pull_and_push(rows, [64] * 26, 4), rel=0.02)


@pytest.mark.parametrize("model", MODELS)
def test_counted_bytes_that_differ_from_the_formulas_raise(model):
    expected = formulas(model, 2, SMALL)
    outside = replicated_bytes(SMALL.unsharded(model), 2)
    split, exchanged = expected["split"] + outside, expected["all_to_all"] + outside
    # the second rank has one table less
    check(expected, {"des": [split] * 2, "torchrec": [exchanged + 1000, exchanged - 1000]}, SMALL)
    for wrong in (
        {"des": [split, split + 4], "torchrec": [exchanged] * 2},
        {"des": [split] * 2, "torchrec": [exchanged + 4] * 2},
    ):
        with pytest.raises(RuntimeError, match=r"bytes were counted, the formula says"):
            check(expected, wrong, SMALL)


@pytest.mark.parametrize(("command", "reason"), [("/bin/tc", "take root"), (None, "install iproute2")])
def test_command_without_links_gives_the_reason(tmp_path, monkeypatch, capsys, command, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(network.shutil, "which", lambda name: command)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as ended:
        splitting.main(["--quick"])
    assert ended.value.code == 1
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_times_that_are_not_stored_cannot_be_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(splitting, "require_links", lambda parser: None)
    with pytest.raises(SystemExit):
        splitting.main(["--keep-times"])
    assert "measure all of them" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("links", "forks")
def test_failing_worker_raises_with_its_output():
    wrong = replace(SMALL, global_batch_size=-2)
    job = {"model": "lr", "workload": asdict(wrong)}
    with (
        Network(2) as two,
        Workers(two, splitting.WORKER, job, threads=1) as workers,
        pytest.raises(RuntimeError, match="a worker has ended:\nrank 0:\n"),
    ):
        workers.ask(do="time")
    assert not own_namespaces()


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("links", "forks")
def test_quick_run_fills_every_figure(run_quick):
    result = run_quick(splitting.main, "splitting")
    figures = result["figures"]
    endings = ("", "_a2a", "_one_hot", "_with_ids", "_with_ids_one_hot")
    assert {f"bytes_saved_{model}{ending}" for model in MODELS for ending in endings} <= {*figures}
    assert 0 <= figures["planner_hits_share"] <= 1
    assert figures["auto_worst_ratio_low"] <= figures["auto_worst_ratio"] <= figures["auto_worst_ratio_high"]
    for ending in ("", "_logits"):  # 8 and 11 binary digits
        assert 0 < figures[f"wire_error_fp16{ending}"] < figures[f"wire_error_bf16{ending}"] < 0.05
    assert [row["model"] for row in result["rows"] if "rounds" in row] == ["lr", "dlrm"]
    assert not own_namespaces()
