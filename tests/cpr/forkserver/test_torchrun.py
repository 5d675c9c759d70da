"""Under a real torchrun, all generations but the first are forks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cpr.forkserver.processes import environment_of, wait_for_end

WORKER = Path(__file__).with_name("torch_worker.py")
REPO = Path(__file__).parents[3]


@pytest.mark.system
@pytest.mark.timeout(300)
def test_restarted_workers_are_forks_that_compute_and_fail_normally(tmp_path):
    mark = f"MARK_OF_TEST={tmp_path}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*torchrun, "--max-restarts", "3", "--log-dir", str(tmp_path), str(WORKER), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPO), "MARK_OF_TEST": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    workers = sorted((each["generation"], each["rank"]) for each in seen)
    assert workers == [(generation, rank) for generation in range(4) for rank in range(2)]
    for each in seen:
        # rank 1 of the first generation may start late enough to be a fork
        first = each["generation"] == each["rank"] == 0
        assert each["name"] == "cpr-worker" or each["generation"] == 0
        assert each["name"] != "cpr-worker" or not first
        assert each["gradient"] == 2 * 600.0
    assert len({each["drawn"] for each in seen}) == len(seen)
    (error,) = tmp_path.rglob("error.json")
    assert str(error) in {each["error_file"] for each in seen if each["generation"] == 1}
    assert "what went wrong" in error.read_text()
    assert ran.stderr.count("exitcode: -9") == 2
    left = [pid for pid in psutil.pids() if mark.encode() in environment_of(pid)]
    for pid in left:
        wait_for_end(psutil.Process(pid))
