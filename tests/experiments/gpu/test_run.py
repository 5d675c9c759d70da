"""The check of a GPU, with all its parts on the CPU: what is left untested is the card."""

import json
import subprocess
import sys
from dataclasses import replace
from math import nan

import pytest
import torch
import torch.distributed as dist

from cpr.versions import IncompatiblePackagesError
from data.batch import Batch
from dlrm.launch.device import Ranks
from experiments.gpu import parts
from experiments.gpu.measure import QUICK, run
from experiments.gpu.parts import PARTS, Part, _losses
from experiments.gpu.run import main
from experiments.gpu.worker import Clock, _Batches
from experiments.gpu.worker import main as work
from experiments.harness import command, launch, samples
from experiments.harness.launch import running
from experiments.harness.record import Record
from experiments.harness.workload import Workload
from tests.datasets import generate_few

CPU = replace(QUICK, device="cpu")


def stored(record):
    return json.loads(record.path.read_text())


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forks")
def test_all_parts_on_the_cpu(tmp_path, monkeypatch):
    def measure(module, job, *, processes, threads, timeout_s):
        out = tmp_path / "measured.json"
        assert work([json.dumps({**job, "out": str(out)})]) == 0
        assert not dist.is_initialized()
        return json.loads(out.read_text())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samples, "generate", generate_few)
    monkeypatch.setattr(parts, "torchrun_command", launch.torchrun_command)  # of `forks`
    monkeypatch.setattr(parts, "measure_under_torchrun", measure)
    record = Record("gpu", {}, seeds=[], folder=tmp_path)
    assert run(record, CPU, PARTS) == 0
    figures, rows = stored(record)["figures"], {row["key"]: row for row in record.rows}
    assert figures["gpu_loss_error"] == 0  # of a device with itself
    assert len(rows["terabyte"]["losses"]) == QUICK.compared_steps
    assert len(rows["tiny"]["losses"]) == QUICK.tiny_steps
    assert rows["tiny"]["auc"] == rows["tiny"]["auc_cpu"]
    assert figures["gpu_samples_per_s"] > 0
    assert figures["gpu_ratio_to_torchrec"] > 0
    assert (figures["gpu_kill_recovered"], figures["gpu_copy_out_recovered"]) == (1, 1)
    assert rows["kill"]["auc"] == pytest.approx(rows["copy_out"]["auc"], abs=0.2)


@pytest.mark.parametrize("wrong", ["fbgemm needs the NVIDIA driver", None], ids=str)
def test_without_a_gpu_it_says_so_and_ends(monkeypatch, capsys, wrong):
    def check(device):
        assert device == "cuda"
        if wrong:
            raise IncompatiblePackagesError(wrong)

    monkeypatch.setattr(command, "check_versions", check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 1
    told = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in told
    assert (wrong or "`cpr doctor` says what is missing") in told


def test_the_command_line_needs_no_fbgemm():
    # whose build for CUDA cannot be imported without a driver
    code = (
        "import sys; sys.modules['fbgemm_gpu'] = None; sys.argv[1:] = ['--help']\n"
        "import runpy; runpy.run_module('experiments.gpu', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{{{','.join(PARTS)}}}" in done.stdout


def test_a_part_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch, capsys):
    def fails(check, deadline):
        raise RuntimeError("CUDA error: an illegal memory access")

    rates = {"none": [30.0, 50.0], "prefetch": [15.0, 60.0], "torchrec": [10.0, 40.0]}
    made = {
        "tiny": Part(1, lambda check, deadline: {"loss_error": 1e-6}),
        "terabyte": Part(1, fails),
        "speed": Part(1, lambda check, deadline: {"samples_per_s": rates}),
        "kill": Part(1, fails),
    }
    monkeypatch.setattr("experiments.gpu.measure.PARTS", made)
    record = Record("gpu", {}, seeds=[], folder=tmp_path)
    assert run(record, CPU, made) == 1
    figures, notes = stored(record)["figures"], stored(record)["notes"]
    assert figures["gpu_ratio_to_torchrec"] == 2.25
    assert figures["gpu_samples_per_s"] == 45
    assert figures["gpu_prefetch_speedup"] == pytest.approx((0.5 + 1.2) / 2)
    assert figures["gpu_loss_error_tiny"] == 1e-6
    assert figures["gpu_loss_error"] is figures["gpu_loss_error_terabyte"] is None
    assert figures["gpu_kill_recovered"] == 0
    assert "illegal memory access" in notes["gpu_loss_error"]
    assert "illegal memory access" in notes["gpu_kill_recovered"]
    said = capsys.readouterr().out
    assert "terabyte: FAILED: RuntimeError: CUDA error" in said
    assert "speed: ok" in said


def test_all_time_limits_together_are_eight_minutes():
    assert sum(part.limit_s for part in PARTS.values()) <= 480


def test_a_launch_over_its_limit_is_ended():
    command = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(60)"]
    with running(command, threads=1) as launched, pytest.raises(RuntimeError, match="took longer than 0 s"):
        launched.check_ended_well(0.1)
    assert launched.process.returncode


@pytest.mark.parametrize("wrong", [0.75, nan])
def test_losses_that_differ_fail(wrong):
    assert _losses([0.7, 0.6], [0.7, 0.6 * 1.001])["loss_error"] == pytest.approx(1e-3, rel=0.01)
    with pytest.raises(RuntimeError, match="loss number 2"):
        _losses([0.7, wrong, 0.5], [0.7, 0.6, 0.5])


def test_the_clock_waits_for_the_gpu_before_it_is_read(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    times = iter([10.0, 12.0])
    monkeypatch.setattr("experiments.gpu.worker.perf_counter", lambda: calls.append("read") or next(times))
    clock = Clock(torch.device("cuda", 0), Workload(warm_up_steps=2, steps=4, global_batch_size=100))
    for step in range(6):
        calls.append(step)
        clock.tick()
    assert calls == [0, 1, "wait", "read", 2, 3, 4, 5, "wait", "read"]
    assert clock.samples_per_s == 200


def test_batches_for_a_gpu_are_pinned_and_only_ours_copied_ahead(monkeypatch):
    class Ahead:
        def __init__(self, device):
            self.device = device

        def over(self, batches):
            return ((batch, self.device) for batch in batches)

    monkeypatch.setattr("experiments.gpu.worker.CopyAhead", Ahead)
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: "pinned")
    workload = Workload(rows=100, global_batch_size=4, warm_up_steps=1, steps=1, num_batches=1)
    gpu, ranks = torch.device("cuda", 0), Ranks(0, 0, 1)
    clock = Clock(torch.device("cpu"), workload)
    assert list(_Batches(workload, ranks, clock, gpu, copies_ahead=False)) == ["pinned"] * 3
    clock = Clock(torch.device("cpu"), workload)
    assert list(_Batches(workload, ranks, clock, gpu, copies_ahead=True)) == [("pinned", gpu)] * 3
