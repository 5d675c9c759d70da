"""`examples/slurm.sbatch` under a Slurm of its own, with two nodes on this machine."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest

from tests.readmes import ROOT
from tests.system.runs import free_port, make_dataset, only_folder, report_of, wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = (os.uname().nodename, "zzz")
"""The first one's name is an address: workers meet there."""
CONFIG = """
ClusterName=test
SlurmctldHost={nodes[0]}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={nodes[0]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, DAEMONS)), reason="takes root, slurm-wlm and munge"
    ),
]


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """Starts a controller and two nodes; `SLURM_CONF` names them to Slurm's commands."""
    folder = tmp_path_factory.mktemp("slurm")
    monkeypatch.setattr(
        "tests.system.runs.PATIENCE_S", 300.0
    )  # two starts of everything, without fork servers
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=ports, nodes=NODES))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    (folder / "state").mkdir()
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    munged = ["munged", "-F", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    with ExitStack() as ending:

        def daemon(*command):
            log = ending.enter_context((folder / f"{command[0]}.txt").open("ab"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            ending.callback(process.wait, 30)
            ending.callback(process.terminate)

        daemon(*munged)
        wait_for((folder / "socket").exists)
        daemon("slurmctld", "-D", "-i")
        for node in NODES:
            daemon("slurmd", "-D", "-N", node)
        wait_for(lambda: "\n".join(called("sinfo", "-h", "-N", "-o", "%T").split()) == "idle\nidle")
        yield folder
        called("scancel", "--user=root")
        wait_for(lambda: not called("squeue", "-h"))


def called(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture
def submit(slurm, tmp_path, monkeypatch):
    """Submits the script for a run of 200 steps; returns the job's number, folder and log."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("cpr", "cpr.cli"), ("torchrun", "torch.distributed.run")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (tools / name).chmod(0o755)
    for name, value in {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNS": tmp_path / "runs",
        "DATA": make_dataset(tmp_path / "data"),
        "RECIPE": "tiny",
        "TABLES": "10MB",
        "WORKERS": "1",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, str(value))

    def run(options, *overrides):
        log = tmp_path / "log.txt"
        log.touch()
        resources = ("--cpus-per-task=1", "--mem=0", f"--output={log}", f"--chdir={tmp_path}", *options)
        settings = ("data.global_batch_size=20", "train.log_every_steps=10", *overrides)
        job = called("sbatch", "--parsable", *resources, str(ROOT / "examples/slurm.sbatch"), *settings)
        return job.strip(), tmp_path / "runs" / job.strip(), log

    return run


def test_a_job_whose_node_dies_is_requeued_and_resumes(submit):
    job, runs, log = submit(["--time=10"], "checkpoint.every_steps=20")
    wait_for(lambda: re.search(r"step 60 ", log.read_text()))
    second = [each for each in of_job(job) if each.environ().get("SLURM_NODEID") == "1"]
    for each in second:
        each.send_signal(signal.SIGKILL)
    wait_for(lambda: "the run resumes from the newest checkpoint" in log.read_text())
    wait_for(lambda: not called("squeue", "-h"))
    assert report_of(only_folder(runs))["steps"] == 200, log.read_text()


def test_a_job_that_reaches_its_time_limit_saves_and_resumes_where_it_stopped(submit):
    # Slurm counts limits in minutes, and may tell the script up to a minute early
    job, _, log = submit(["--time=2", "--signal=B:USR1@30"], "train.epochs=10000")
    wait_for(lambda: "the run resumes from the newest checkpoint" in log.read_text())
    called("scancel", job)
    (step,) = re.findall(r"saved at step (\d+) before leaving", log.read_text())
    assert f"begins at step {step} (resume)" in log.read_text()


def of_job(job):
    """Processes of the job's training on all nodes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_JOB_ID") == job:
                found.append(process)
        except psutil.Error:
            pass
    return found
