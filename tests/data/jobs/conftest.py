"""A Dask cluster of two worker processes, and an S3 server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.s3_server import s3, start_s3  # noqa: F401  # fixtures

ROOT = Path(__file__).parents[3]
LOCAL_CLUSTER = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    options = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "3GB", "dashboard_address": None}
    with LocalCluster(**options) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


@dataclass(frozen=True)
class LocalDask:
    """A scheduler and two workers, which are processes of their own."""

    address: str
    process: "subprocess.Popen[str]"

    def workers(self) -> list[psutil.Process]:
        """The worker processes."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


@pytest.fixture(scope="session")
def dask_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDask]:
    """A local cluster; it starts a worker again that was killed."""
    script = tmp_path_factory.mktemp("dask") / "local_cluster.py"
    script.write_text(LOCAL_CLUSTER)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        assert process.stdout is not None
        yield LocalDask(process.stdout.readline().strip(), process)
