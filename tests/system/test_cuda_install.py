"""The lock for CUDA installs, on a machine without NVIDIA's driver too. It takes 9 GB and some minutes."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
WANTED = "CPR_TEST_CUDA_INSTALL"


@pytest.mark.timeout(1200)
@pytest.mark.skipif(WANTED not in os.environ, reason=f"too large for each day: set {WANTED}=1")
def test_cuda_installs_and_only_the_driver_may_be_missing(tmp_path):
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=tmp_path, input=archive.stdout, check=True)
    subprocess.run(["make", "DEVICE=cuda", "install"], cwd=tmp_path, check=True)
    assert (tmp_path / ".venv/installed-cuda").exists()
    code = "import torch; assert torch.version.cuda and not torch.cuda.is_initialized()"
    python = tmp_path / ".venv/bin/python"
    subprocess.run([python, "-c", code], check=True)
    checked = subprocess.run(
        [python, "-m", "cpr.versions", "cuda"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0 or "The packages are right" in checked.stdout + checked.stderr
