"""The experiment on the schedules of a training step: figures, the clock, and a small real run."""

import time

import pytest
import torch
import torch.distributed as dist

from experiments.pipeline import quality
from experiments.pipeline import run as pipeline
from experiments.pipeline.exchanges import BACKWARD, DENSE, FORWARD, IDS, clocked, formula_s
from experiments.pipeline.figures import Cell, figures_of
from experiments.pipeline.schedules import NONE, SCHEDULES
from experiments.pipeline.shapes import SHAPES
from tests.experiments.harness.namespaces import own_namespaces

PLAIN = {"step_s": 0.1, "ids_s": 0.01, "forward_s": 0.02, "backward_s": 0.02, "dense_s": 0.03}
COUNTS = {"cpu_s": 0.05, "sent_bytes": 1000.0}


def row(cell, steps_s, speeds=(1.0, 2.0, 0.5, 3.0)):
    """A row of rounds in which the machine has these speeds, and schedules other than `none` these steps."""
    rounds = []
    for speed in speeds:
        took = {name: {"step_s": each_s * speed} | COUNTS for name, each_s in steps_s.items()}
        rounds.append({NONE: {name: value * speed for name, value in PLAIN.items()} | COUNTS} | took)
    return {
        "shape": cell.shape,
        "workers": cell.workers,
        "gbit_per_s": cell.gbit_per_s,
        "bytes": {IDS: 1e6, FORWARD: 2e6},
        "calls": {IDS: 3, FORWARD: 1},
        "latency_s": 1e-3,
        "chosen": "prefetch",
        "rounds": rounds,
    }


def steps_s(**named):
    return dict.fromkeys(("prefetch", "waves", "delayed"), 0.1) | named


FIRST = Cell(shape="terabyte", workers=2, gbit_per_s=1.0)
SECOND = Cell(shape="tiny", workers=4, gbit_per_s=None)


def test_figures_are_ratios_within_rounds():
    rows = [
        row(FIRST, steps_s(prefetch=0.08, waves=0.075)),
        row(SECOND, steps_s(prefetch=0.125)),
    ]
    figures, notes = figures_of(rows)
    for edge in ("", "_low", "_high"):
        assert figures[f"prefetch_speedup_1gbps{edge}"] == pytest.approx(1.25)
        assert figures[f"ids_share_1gbps{edge}"] == pytest.approx(0.1)
        # 0.02 s of a step are computation, which is less than the exchanges
        assert figures[f"hideable_share_1gbps{edge}"] == pytest.approx(0.2)
        assert figures[f"prefetch_hidden_share_1gbps{edge}"] == pytest.approx(1)
        assert figures[f"waves_hidden_share_1gbps{edge}"] == pytest.approx(1.25)
        assert figures[f"prefetch_hidden_share_tiny_4_workers_unthrottled{edge}"] == pytest.approx(-1.25)
        assert figures[f"prefetch_worst_ratio{edge}"] == pytest.approx(0.8)
        assert figures[f"auto_worst_ratio{edge}"] == pytest.approx(0.8)  # it chose prefetch
    assert figures["prefetch_hidden_share"] == pytest.approx(-0.125)
    assert figures["prefetch_hidden_share_low"] == pytest.approx(-1.25)
    assert figures["prefetch_hidden_share_high"] == pytest.approx(1)
    assert notes["prefetch_worst_ratio"] == str(SECOND)
    assert notes["auto_worst_ratio"] == str(SECOND)
    assert figures["auto_prefetch_share"] == 1
    right, _ = figures_of([rows[0], rows[1] | {"chosen": NONE}])
    assert right["auto_worst_ratio"] == pytest.approx(0.9375)  # waves are faster in the first cell
    assert figures["waves_bytes_ratio_1gbps"] == 1


def test_hideable_time_by_formula():
    assert formula_s(5e6, 2, 1.0, 1e-3) == pytest.approx(0.042)
    assert formula_s(5e6, 2, None, 1e-3) == pytest.approx(0.002)
    steady = (1.0, 1.0, 1.0)
    figures, _ = figures_of([row(FIRST, steps_s(), steady), row(SECOND, steps_s(), steady)])
    # 28 ms are more than the computation; the latencies of four collectives are less
    assert figures["hideable_formula_share_1gbps"] == pytest.approx(0.2)
    assert figures["hideable_formula_share_tiny_4_workers_unthrottled"] == pytest.approx(0.04)


def test_schedule_that_a_shape_does_not_allow_is_left_out_of_its_cells():
    split = row(SECOND, steps_s())
    for each in split["rounds"]:
        del each["waves"]
    figures, notes = figures_of([row(FIRST, steps_s(waves=0.2)), split])
    assert figures["waves_worst_ratio"] == pytest.approx(0.5)
    assert notes["waves_worst_ratio"] == str(FIRST)
    assert "waves_speedup_tiny_4_workers_unthrottled" not in figures
    assert "waves" not in SHAPES["deepfm"].schedules


def test_nothing_to_hide_has_no_hidden_share():
    few = row(FIRST, steps_s())
    for each in few["rounds"]:
        each[NONE] |= {"ids_s": 0.0, "forward_s": 0.0}
    figures, _ = figures_of([few])
    assert figures["hideable_share_1gbps"] == 0
    assert "prefetch_hidden_share_1gbps" not in figures
    assert "waves_hidden_share_1gbps" in figures


def test_aucs_are_paired_by_seed():
    aucs = {(NONE, 0): 0.7, (NONE, 1): 0.8, ("prefetch", 0): 0.7, ("prefetch", 1): 0.8, ("late", 0): 0.6}
    rows = [{"contender": name, "seed": seed, "auc": auc} for (name, seed), auc in aucs.items()]
    figures = quality.auc_figures([*rows, {"contender": "late", "seed": 1, "auc": 0.81}])
    assert figures["prefetch_auc_delta"] == figures["prefetch_auc_delta_ci"] == 0
    assert figures["late_auc_delta"] == pytest.approx(-0.045)
    assert figures["late_auc_delta_low"] == pytest.approx(-0.1)
    assert figures["late_auc_delta_high"] == pytest.approx(0.01)


@pytest.fixture
def slow_exchange(monkeypatch):
    """An all-to-all that takes time when it is started and when it is waited for, without a process group."""

    class Work:
        def wait(self):
            time.sleep(0.02)
            return True

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
        time.sleep(0.01)
        return Work()

    monkeypatch.setattr(dist, "Work", Work)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


class Exchanged(torch.autograd.Function):
    """Identity with an exchange in each direction, waited for in the forward pass alone."""

    @staticmethod
    def forward(ctx, values):
        dist.all_to_all_single(values, values).wait()
        return values * 1

    @staticmethod
    def backward(ctx, grad):
        dist.all_to_all_single(grad, grad)
        return grad


class Synchronizer:
    """Exchanges in each call."""

    def average(self, scalars):
        dist.all_to_all_single(torch.ones(4), torch.ones(4)).wait()
        return scalars


@pytest.mark.usefixtures("slow_exchange")
def test_clock_tells_exchanges_apart():
    original = dist.all_to_all_single
    synchronizer = Synchronizer()
    with clocked(synchronizer) as clock:
        ids = torch.zeros(4, dtype=torch.int64)
        work = dist.all_to_all_single(ids, ids)
        assert work.wait()
        Exchanged.apply(torch.ones(4, requires_grad=True)).sum().backward()
        assert synchronizer.average(3.0) == 3.0
    assert dist.all_to_all_single is original
    assert clock.seconds[IDS] >= 0.03
    assert clock.seconds[FORWARD] >= 0.03
    assert clock.seconds[BACKWARD] >= 0.01
    assert clock.seconds[DENSE] >= 0.03


@pytest.mark.system
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("links", "forks")
def test_quick_run_fills_every_figure(run_quick):
    figures = run_quick(pipeline.main, "pipeline")["figures"]
    for schedule in {*SCHEDULES} - {NONE}:
        ends = [figures[f"{schedule}_speedup_1gbps{edge}"] for edge in ("_low", "", "_high")]
        assert 0 < ends[0] <= ends[1] <= ends[2]
    shares = [figures[f"{kind}_share_1gbps"] for kind in (IDS, FORWARD, BACKWARD, DENSE)]
    assert min(shares) > 0
    assert sum(shares) < 1
    assert figures["prefetch_auc_delta"] == figures["prefetch_auc_delta_ci"] == 0
    assert figures["auto_prefetch_share"] in {0, 1}
    assert figures["peak_bytes_none"] > 1e8
    assert not own_namespaces()
