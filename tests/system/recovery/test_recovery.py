"""Nodes of the trainer die and join, and runs are stopped; test_resume does the same to workers."""

import re
import signal
import time
from dataclasses import asdict

import psutil
import pytest

from cpr.faults import Killer, LoseNode
from experiments.recovery.launch import NodesRun
from tests.programs import at_work
from tests.system.runs import curve, free_port, only_folder, report_of, settings, wait_for_step

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

OPTIONS = (
    "data.window_batches=7",
    "train.precision=fp32",
    "train.evaluate_every_steps=50",
    "checkpoint.every_steps=20",
)
NEVER = "train.evaluate_every_steps=0"


def wait_until_free(memory):
    """The janitor frees it when torchrun has ended."""
    deadline = time.monotonic() + 60
    while any(memory.iterdir()):
        assert time.monotonic() < deadline, "the memory was not freed"
        time.sleep(0.1)


def test_a_lost_node_loses_its_shards_alone(lender, dataset, tmp_path):
    arguments = settings(
        dataset, tmp_path, *OPTIONS, "data.global_batch_size=10", "train.max_steps=300", NEVER
    )
    arguments = ["dlrm.train", *(each for each in arguments if not each.startswith("train.run_folder"))]
    program = {"module": "tests.programs", "environment": lender}
    with NodesRun(tmp_path / "nodes", arguments, workers_per_node=1, **program) as run:
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
    arguments = settings(dataset, tmp_path / "runs", *OPTIONS, NEVER)
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
    assert report_of(only_folder(tmp_path / "runs"))["steps"] == 200
    assert not [
        child for child in psutil.Process().children(recursive=True) if "dlrm.train" in child.cmdline()
    ]


def test_a_node_that_joins_stops_no_run_and_costs_nothing(start, dataset, memory, tmp_path):
    """torchrun stops healthy workers then, as it does at the end, and starts them with others."""
    endpoint = f"localhost:{free_port()}"
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", 1)
    worker = ("-m", "tests.programs", "dlrm.train")
    soon = ("--rdzv-conf", "last_call_timeout=3")  # instead of 30 s for another node that may come
    flags = ("--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    runs = tmp_path / "runs"
    same_kinds = "sharding.data_parallel_rows=0"  # one node alone replicates none
    more = settings(dataset, runs, *OPTIONS, "train.epochs=50", NEVER, same_kinds)
    command = (*torchrun, *flags, *soon, *worker, *more)
    # as `cpr run` has it: else torch 2.13 lets a node that joins wait for an address that no process tells
    environment = {"CPR_RESIDENT_ROOT": str(memory), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = start(*command, environment=environment, forks=True)
    wait_for_step(first, runs, 30)
    second = start(*command, environment=environment, forks=True)
    while not psutil.Process(at_work(second.pid)).children():  # both nodes are there, the old worker is gone
        assert second.poll() is None, second.communicate()
        time.sleep(0.1)
    before = curve(only_folder(runs))[-1]["step"]
    wait_for_step(second, runs, before + 40)
    first.send_signal(signal.SIGTERM)
    second.send_signal(signal.SIGTERM)
    said = "".join(each.communicate(timeout=60)[1] for each in (first, second))
    (kind, begun_at) = re.search(r"generation 1 begins at step (\d+) \((\w+)\)", said).group(2, 1)
    assert kind == "process"
    assert int(begun_at) >= before
    trained = [line["step"] for line in curve(only_folder(runs)) if line["kind"] == "train"]
    assert trained == list(range(10, trained[-1] + 1, 10))
    wait_until_free(memory)
