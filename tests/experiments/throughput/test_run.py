"""The logic of the throughput comparison on made-up speeds, and real workers."""

import json
from dataclasses import asdict

import pytest
import torch.distributed as dist

from experiments.harness.launch import torchrun
from experiments.harness.record import Record
from experiments.harness.workload import OURS, TORCHREC, Setting, Workload
from experiments.throughput import run as throughput
from experiments.throughput.breakdown import KINDS
from experiments.throughput.run import rates_by_round, turns
from experiments.throughput.worker import main as work

TINY = Workload(rows=2000, global_batch_size=64, warm_up_steps=2, steps=3, num_batches=2)
SPEEDS = {
    "ours bf16 1x2": 60.0, "ours bf16 2x1": 50.0, "ours fp32 1x2": 26.0, "ours fp32 2x1": 20.0,
    "torchrec bf16 1x2": 24.0, "torchrec bf16 1x2 pipelined": 25.0,
    "torchrec bf16 2x1": 20.0, "torchrec bf16 2x1 pipelined": 10.0,
    "torchrec fp32 1x2": 12.0, "torchrec fp32 1x2 pipelined": 13.0,
    "torchrec fp32 2x1": 11.0, "torchrec fp32 2x1 pipelined": 1.0,
    "torchrec bf16 1x2 pipelined keeps memory": 30.0,
}  # fmt: skip


def test_whole_experiment_on_made_up_speeds(run_quick, monkeypatch):
    launched = []

    def launch(setting, workload, profiled=False):
        launched.append(setting.name)
        return {"samples_per_s": SPEEDS[setting.name]} | (
            {"breakdown_ms": dict.fromkeys(KINDS, 1.0)} if profiled else {}
        )

    monkeypatch.setattr(throughput, "launch", launch)
    stored = run_quick(throughput.main, "throughput")
    measured = ["ours bf16 1x2", "torchrec bf16 1x2 pipelined"]
    assert launched == [*measured, "torchrec bf16 1x2 pipelined keeps memory", *measured]  # at last: profiles
    assert stored["figures"]["ratio_to_torchrec_best"] == 60 / 25
    assert stored["figures"]["matmul_share"] == 2 / len(KINDS)
    assert stored["figures"]["ratio_to_torchrec_fp32"] is None
    assert "not measured" in stored["notes"]["ratio_to_torchrec_fp32"]


def test_every_other_round_is_reversed_and_sides_alternate(tmp_path, monkeypatch):
    monkeypatch.setattr(
        throughput, "launch", lambda setting, *_, **__: {"samples_per_s": SPEEDS[setting.name]}
    )
    record = Record("throughput", {}, seeds=[], folder=tmp_path)
    for number in range(2):
        throughput._play_round(record, number, TINY, turns(OURS, TORCHREC))
    names = [row["setting"] for row in record.rows]
    assert names[:12] == names[13:25][::-1]
    assert all(any(name.startswith("ours") for name in names[k : k + 3]) for k in range(0, 12, 3))
    assert names[12] == names[25] == "torchrec bf16 1x2 pipelined keeps memory"
    assert rates_by_round(record.rows, 2) == [SPEEDS, SPEEDS]


def job(setting, out, profiled=False):
    return json.dumps(
        {"setting": asdict(setting), "workload": asdict(TINY), "profiled": profiled, "out": str(out)}
    )


@pytest.mark.system
@pytest.mark.parametrize(
    "setting",
    [
        OURS[0],
        Setting(trainer="torchrec", precision="bf16", processes=1),
        Setting(trainer="torchrec", precision="fp32", processes=1, pipelined=True),
    ],
    ids=lambda setting: setting.name,
)
def test_a_worker_measures_its_setting(setting, tmp_path):
    out = tmp_path / "measured.json"
    assert work([job(setting, out, profiled=True)]) == 0
    assert not dist.is_initialized()
    measured = json.loads(out.read_text())
    assert measured["samples_per_s"] == pytest.approx(64 / measured["step_s"])
    breakdown = measured["breakdown_ms"]
    for kind in ("matrix products", "interaction", "embedding read", "embedding update", "optimizer"):
        assert breakdown[kind] > 0, kind


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("forks")
def test_two_workers_under_torchrun(tmp_path):
    out = tmp_path / "measured.json"
    torchrun("experiments.throughput.worker", [job(OURS[1], out, profiled=True)], processes=2, threads=1)
    assert json.loads(out.read_text())["breakdown_ms"]["exchange"] > 0
