"""Nodes of the trainer die and join, runs are stopped, and training goes on; of workers see test_resume."""

import json
import re
import signal
import socket
import time
from dataclasses import asdict

import psutil
import pytest

from cpr.faults import Killer, LoseNode
from data.synthetic import SyntheticConfig, generate
from experiments.recovery.launch import NodesRun

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CLOCKS = {"seconds", "samples_per_s", "exchange_seconds", "exchange_share"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "dataset"
    generate(
        SyntheticConfig(scale=1e-4, days=3, rows_per_day=2000, rows_per_block=500, rows_per_file=1000), folder
    )
    return folder


def settings(dataset, runs, *more):
    """200 steps in one epoch."""
    return (
        "--recipe",
        "tiny",
        "--set",
        f"data.uri={dataset}",
        f"train.run_folder={runs}",
        "data.global_batch_size=20",
        "data.window_batches=7",
        "train.precision=fp32",
        "train.evaluate_every_steps=50",
        "train.log_every_steps=10",
        "checkpoint.every_steps=20",
        *more,
    )


def only_folder(runs):
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    return folder


def report_of(runs):
    return json.loads((only_folder(runs) / "report.json").read_text())


def curve(runs):
    """All that the run has measured of its model, clocks left out."""
    lines = [json.loads(line) for line in (only_folder(runs) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] in {"train", "evaluation"}]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def wait_for_step(process, runs, step):
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert process is None or process.poll() is None, process.communicate()
        if any(f'"train", "step": {step}' in path.read_text() for path in runs.glob("*/metrics.jsonl")):
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} did not come")


def wait_until_free(memory):
    """The janitor frees it when torchrun has ended."""
    deadline = time.monotonic() + 60
    while any(memory.iterdir()):
        assert time.monotonic() < deadline, "nobody frees the memory"
        time.sleep(0.1)


def test_a_lost_node_loses_its_shards_alone(dataset, tmp_path):
    arguments = settings(dataset, tmp_path, "data.global_batch_size=10", "train.evaluate_every_steps=200")
    arguments = [each for each in arguments if not each.startswith("train.run_folder")]
    with NodesRun(tmp_path / "nodes", arguments, workers_per_node=1) as run:
        wait_for_step(None, run.wait_for_folder().parent, 60)
        with Killer(nodes=run.nodes) as killer:
            deed = killer.fire(LoseNode(), target=1)
        assert len(deed.pids) >= 2
        report = run.wait(200)
        leftovers = run.leftovers()
    (recovery,) = report["failures"]["recoveries"]
    assert recovery["kind"] == "partial"
    kept = sum(source["adopted"] for source in recovery["sources"])
    lost = sum(source["lost"] for source in recovery["sources"])
    assert kept > 0
    assert lost > 0
    assert recovery["save_step"] % 20 == 0
    assert report["failures"]["pls"] == pytest.approx(
        (recovery["step"] - recovery["save_step"]) * 10 / (report["samples"] // 10 * 10 * 2), rel=0.02
    )
    assert asdict(leftovers) == {"processes": 0, "memory_files": 0, "temporary_files": 0}


def test_a_clean_stop_saves_and_frees_the_memory(start, dataset, memory, tmp_path):
    arguments = settings(dataset, tmp_path / "runs", "train.evaluate_every_steps=200")
    environment = {"CPR_RESIDENT_ROOT": str(memory)}
    run = start("-m", "dlrm.train", *arguments, ranks=2, restarts=3, environment=environment, forks=True)
    wait_for_step(run, tmp_path / "runs", 60)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    saved_at = int(re.search(r"saved at step (\d+) before leaving", said)[1])
    wait_until_free(memory)
    resume = ("--resume", only_folder(tmp_path / "runs"))
    run = start("-m", "dlrm.train", *resume, ranks=2, restarts=3, environment=environment, forks=True)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert f"begins at step {saved_at} (resume)" in said
    assert report_of(tmp_path / "runs")["steps"] == 200
    assert not [
        child for child in psutil.Process().children(recursive=True) if "dlrm.train" in child.cmdline()
    ]


def test_a_node_that_joins_stops_no_run_and_costs_nothing(start, dataset, memory, tmp_path):
    """torchrun stops healthy workers then, as it does at the end, and starts them with others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", 1)
    soon = ("--rdzv-conf", "last_call_timeout=3")  # instead of 30 s for another node that may come
    flags = ("--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    runs = tmp_path / "runs"
    same_kinds = "sharding.data_parallel_rows=0"  # one node alone replicates none
    more = settings(dataset, runs, "train.epochs=50", "train.evaluate_every_steps=0", same_kinds)
    command = (*torchrun, *flags, *soon, "-m", "dlrm.train", *more)
    # as `cpr run` has it: else torch 2.13 lets a node that joins wait for an address that nobody tells
    environment = {"CPR_RESIDENT_ROOT": str(memory), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = start(*command, environment=environment)
    wait_for_step(first, runs, 30)
    second = start(*command, environment=environment)
    while not psutil.Process(second.pid).children():  # both nodes are there, and the old worker is gone
        assert second.poll() is None, second.communicate()
        time.sleep(0.1)
    before = curve(runs)[-1]["step"]
    wait_for_step(second, runs, before + 40)
    first.send_signal(signal.SIGTERM)
    second.send_signal(signal.SIGTERM)
    said = "".join(each.communicate(timeout=60)[1] for each in (first, second))
    (kind, begun_at) = re.search(r"generation 1 begins at step (\d+) \((\w+)\)", said).group(2, 1)
    assert kind == "process"
    assert int(begun_at) >= before
    trained = [line["step"] for line in curve(runs) if line["kind"] == "train"]
    assert trained == list(range(10, trained[-1] + 1, 10))
    wait_until_free(memory)
