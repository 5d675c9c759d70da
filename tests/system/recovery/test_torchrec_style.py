"""A script in TorchRec's own style under plain torchrun: workers are killed, training continues."""

import ast
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.runs import free_port

SCRIPT = Path(__file__).parents[3] / "examples" / "torchrec_style.py"
BATCHES = 45
PATIENCE_S = 150


class Run:
    """The script under torchrun, its journals, and its memory."""

    def __init__(self, start, folder, monkeypatch, *options, forks):
        self.folder = folder
        self.memory = folder / "memory"
        for each in ("memory", "journal"):
            (folder / each).mkdir(exist_ok=True)
        monkeypatch.setenv("CPR_RESIDENT_ROOT", str(self.memory))
        module = ("-m", "tests.programs", "examples.torchrec_style")
        self.process = start(
            "-m", "torch.distributed.run", "--nproc-per-node", 2, "--max-restarts", 3,
            "--master-port", free_port(), *(module if forks else (module[0], module[2])),
            "--checkpoint", folder / "checkpoint", "--journal", folder / "journal",
            "--batches", BATCHES, *options, forks=forks,
        )  # fmt: skip

    def journal(self, rank):
        path = self.folder / "journal" / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, condition):
        """The newest line of every rank's journal, once each fulfils the condition."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            newest = [journal[-1] for rank in (0, 1) if (journal := self.journal(rank))]
            if len(newest) == 2 and all(map(condition, newest)):
                return newest
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        pytest.fail(f"it did not come: {self.process.poll()}, {newest}")

    def end(self):
        _, said = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, said[-4000:]
        return said


def check_data(run):
    """Every batch once, on every rank alike; what is left out is what the story says."""
    journals = [run.journal(rank) for rank in (0, 1)]
    trained = [[line["batch"] for line in journal if line["event"] == "step"] for journal in journals]
    begins = [line for line in journals[0] if line["event"] == "begin"]
    assert len(trained[0]) == len(set(trained[0]))
    skipped = set(range(BATCHES)) - set(trained[0])
    assert len(skipped) == sum(begin["interrupted"] for begin in begins)
    # a worker may be killed after it has finished a step, and before it could write that down
    assert len(set(trained[0]) ^ set(trained[1])) <= len(begins) - 1
    steps = [line["step"] for line in journals[0] if line["event"] == "step"]
    assert steps == sorted(steps)
    return begins


@pytest.mark.system
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "forks"), [((), False), (("--pipeline",), True)], ids=["loop", "pipeline"]
)
def test_a_killed_worker_is_replaced_and_nothing_is_lost(start, tmp_path, monkeypatch, options, forks):
    """One of them starts as a user starts it."""
    run = Run(start, tmp_path, monkeypatch, "--pause-s", 0.05, *options, forks=forks)
    newest = run.wait_for(lambda line: line["event"] == "step" and line["step"] >= 22)
    os.kill(newest[1]["pid"], signal.SIGKILL)
    said = run.end()
    begins = check_data(run)
    assert [begin["kind"] for begin in begins] == ["start", "process"]
    story = begins[1]
    assert (story["generation"], story["pls_added"], story["bytes_read"]) == (1, 0.0, 0)
    assert {ending["rank"]: "no reason given" in ending["why"] for ending in story["dead"]}[1]
    assert sum(origin["adopted"] for origin in story["sources"]) >= 5507  # all rows of all tables, in place
    for rank in (0, 1):
        journal = run.journal(rank)
        at = next(i for i, line in enumerate(journal) if line.get("generation") == 1)
        before, after = journal[at - 1], journal[at]
        assert before["step"] == after["step"]
        if not story["interrupted"]:
            assert before["digest"] == after["digest"]
    assert journal[-1]["event"] == "end"
    assert journal[-1]["pls"] == 0.0
    assert "generation 1 begins at step" in said
    assert not list(run.memory.iterdir())  # nothing is left of it


def test_at_most_ten_lines_were_added():
    lines = SCRIPT.read_text().splitlines()
    added = [line for line in lines if "# +" in line]
    assert len(added) <= 10
    used = {node.lineno for node in ast.walk(ast.parse("\n".join(lines))) if _is_ours(node)}
    assert used <= {number for number, line in enumerate(lines, 1) if "# +" in line or "journal" in line}


def _is_ours(node):
    return isinstance(node, ast.Name) and node.id in {"cpr", "recovery"} and isinstance(node.ctx, ast.Load)
