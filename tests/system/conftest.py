"""Fixtures that start real processes and leave none behind."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.programs import at_work
from tests.system.ranks import Ranks
from tests.system.runs import make_dataset, shared_memory

REPO = Path(__file__).parents[2]


@contextmanager
def starting(request):
    """Starts programs in the repository, and kills those that still run at the end, by their pids.

    With `forks`, the programs and torchrun's workers are forks of a process that has imported everything.
    """
    started = []

    def work(*command, ranks=0, restarts=0, environment=None, forks=False):
        torchrun = ("--standalone", "--nproc-per-node", ranks, "--max-restarts", restarts)
        if forks:
            environment = {**request.getfixturevalue("lender"), **(environment or {})}
            program = ("-m", "tests.programs", *command[1:])
            if ranks:
                program = ("-m", "tests.programs", "torch.distributed.run", *torchrun, *program)
            command = (sys.executable, "-u", *program)
        elif ranks:
            command = (Path(sys.executable).with_name("torchrun"), *torchrun, *command)
        else:
            command = (sys.executable, *command)
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    try:
        yield work
    finally:
        for process in started:
            if process.poll() is None:
                parent = psutil.Process(at_work(process.pid))
                for each in [*parent.children(recursive=True), parent]:
                    each.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


@pytest.fixture
def start(request):
    """Starts programs for one test."""
    with starting(request) as work:
        yield work


@pytest.fixture(scope="module")
def start_for_all(request):
    """Starts programs that the tests of a file share."""
    with starting(request) as work:
        yield work


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture
def memory():
    """A folder of shared memory for one test, which must leave nothing in it."""
    with shared_memory() as folder:
        yield folder


@pytest.fixture
def world_of_one():
    """A process group of this process alone, on one thread, as each of several ranks has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def start_ranks(tmp_path):
    """Starts the ranks of a process group; whatever is left of them afterwards is killed."""
    started = []

    def work(function, *arguments, world_size):
        started.append(Ranks(function, arguments, world_size, tmp_path))
        return started[-1]

    yield work
    for each in started:
        each.end()
