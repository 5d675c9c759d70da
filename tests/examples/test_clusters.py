"""The files for Slurm and Kubernetes, in a shell whose `cpr`, `srun` and `scontrol` only take notes.

What they would run must be accepted by the parsers of `cpr`, torchrun and the trainer.
"""

import os
import subprocess

import pytest
import yaml
from torch.distributed.run import get_args_parser

import dlrm.train
from cpr.cli.main import build_parser
from dlrm.config.recipe import load_config
from tests.readmes import ROOT

NOTE = '{ printf "%s\\t" "${0##*/}" "$@"; echo; } >> notes'
TOOLS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "scontrol": f'[ "$1" = show ] && echo first || {NOTE}',
    "scancel": f"{NOTE}; touch stopping",
    "cpr": f'{NOTE}; [ "$1" = doctor ] || {{ eval "$WHILE_TRAINING"; exit "$CODE"; }}',
}
"""Programs that the scripts call."""
STOPPED = "kill -USR1 $PPID; until [ -e stopping ]; do sleep 0.01; done"
"""The time limit is near, and the script has told all nodes to stop."""


@pytest.fixture
def shell(tmp_path):
    """Runs a script; returns its exit code and what it has called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in TOOLS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)

    def run(text, *words, **variables):
        (tmp_path / "notes").unlink(missing_ok=True)
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CODE": "0",
            "WHILE_TRAINING": "",
            **variables,
        }
        code = subprocess.run(
            ["bash", "-c", text, "script", *words], cwd=tmp_path, env=environment, check=False, timeout=60
        ).returncode
        return code, [line.split("\t")[:-1] for line in (tmp_path / "notes").read_text().splitlines()]

    return run


def check_training(words):
    """Parse a whole command line; returns the options of torchrun and of the trainer."""
    command = build_parser().parse_args(words[1:]).command
    assert command[:2] == ["--", "torchrun"]
    torchrun = get_args_parser().parse_args(command[2:])
    assert (torchrun.module, torchrun.training_script) == (True, "dlrm.train")
    trainer = dlrm.train.parse(torchrun.training_script_args)
    load_config(trainer.recipe or "tiny", trainer.overrides)
    return torchrun, trainer


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": "3"}
SCRIPT = (ROOT / "examples/slurm.sbatch").read_text()


def test_slurm_checks_nodes_trains_and_resumes(shell, tmp_path):
    code, (doctor, training) = shell(SCRIPT, "train.epochs=2", **SLURM)
    assert code == 0
    options = build_parser().parse_args(doctor[1:])
    assert (options.nodes, options.node_rank, options.rdzv) == (3, 1, "first:20007")
    assert options.checkpoint == f"{tmp_path}/runs/7"
    torchrun, trainer = check_training(training)
    assert (torchrun.nnodes, torchrun.rdzv_id, torchrun.rdzv_endpoint) == ("3", "7-0", "first:20007")
    assert trainer.recipe == "terabyte"
    assert trainer.overrides[-1] == "train.epochs=2"

    (tmp_path / "runs/7/20261123-tiny/checkpoint/saves").mkdir(parents=True)
    _, (_, training) = shell(SCRIPT, "train.epochs=2", **SLURM, SLURM_RESTART_COUNT="1")
    torchrun, trainer = check_training(training)
    assert torchrun.rdzv_id == "7-1"
    assert trainer.resume == tmp_path / "runs/7/20261123-tiny"
    assert trainer.overrides[-1] == "train.epochs=2"


@pytest.mark.parametrize(
    ("variables", "code", "calls"),
    [
        ({"CODE": "1"}, 0, ["scontrol requeue 7"]),
        ({"CODE": "1", "SLURM_RESTART_COUNT": "10"}, 1, []),
        ({"CODE": "143", "WHILE_TRAINING": STOPPED}, 0, ["scancel --signal=TERM 7", "scontrol requeue 7"]),
        ({"CODE": "0", "WHILE_TRAINING": STOPPED}, 0, ["scancel --signal=TERM 7"]),
    ],
    ids=["failed", "failed too often", "stopped", "finished just before"],
)
def test_slurm_requeues_what_has_not_finished(shell, variables, code, calls):
    found, notes = shell(SCRIPT, **SLURM, **variables)
    assert found == code
    assert [" ".join(note) for note in notes if note[0] != "cpr"] == calls


def test_kubernetes_checks_the_node_trains_and_resumes(shell, tmp_path):
    job = yaml.safe_load((ROOT / "examples/kubernetes.yaml").read_text())["spec"]["replicatedJobs"][0][
        "template"
    ]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c"]
    text = container["args"][0].replace("=/runs", f"={tmp_path}/runs")
    variables = {each["name"]: each.get("value", "0") for each in container["env"]} | {"RUN": "dlrm"}
    code, (doctor, training) = shell(text, **variables, JOB_COMPLETION_INDEX="0")
    assert code == 0
    (memory,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shared-memory"]
    assert (memory["medium"], memory["sizeLimit"]) == ("Memory", "200Gi")
    options = build_parser().parse_args(doctor[1:])
    assert (options.memory, options.checkpoint) == ("200GB", f"{tmp_path}/runs/dlrm")
    torchrun, trainer = check_training(training)
    assert (torchrun.nproc_per_node, variables["OMP_NUM_THREADS"]) == ("8", "4")
    assert int(torchrun.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert torchrun.rdzv_endpoint == "dlrm-node-0-0.dlrm:29500"
    assert trainer.recipe == "terabyte"

    run = tmp_path / "runs/dlrm/20261123-terabyte"
    (run / "checkpoint/saves").mkdir(parents=True)
    _, (_, same) = shell(text, **variables, JOB_COMPLETION_INDEX="1")
    assert same == training, "a pod that replaces another joins with the same command"
    _, (_, resumed) = shell(text, **{**variables, "ATTEMPT": "1"}, JOB_COMPLETION_INDEX="0")
    assert check_training(resumed)[1].resume == run
