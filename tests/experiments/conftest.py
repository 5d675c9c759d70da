"""Fixtures that tests of several experiments share."""

import json
import sys

import pytest

from experiments.harness import launch, samples, workers
from experiments.harness.network import NoNetworkError, check_possible
from tests.datasets import generate_few


@pytest.fixture
def links():
    """Skips the test where this machine or user cannot limit the speed of links."""
    try:
        check_possible()
    except NoNetworkError as error:
        pytest.skip(str(error))


@pytest.fixture
def run_quick(tmp_path, monkeypatch):
    """Runs a small experiment in an empty folder, on data of few features; returns the stored result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samples, "generate", generate_few)

    def run(main, name, *arguments):
        assert main(["--quick", *arguments]) == 0
        folder = tmp_path / "runs" / "quick"
        assert (folder / f"{name}.png").stat().st_size > 10_000
        return json.loads((folder / f"{name}.json").read_text())

    return run


@pytest.fixture
def forks(lender, monkeypatch):
    """Has torchrun and all workers start as forks of a process that has imported everything."""
    torchrun_command = launch.torchrun_command

    def command(module, arguments, processes, restarts=0):
        _, _, *torchrun = torchrun_command("tests.programs", [module, *arguments], processes, restarts)
        return [sys.executable, "-u", "-m", "tests.programs", *torchrun]

    def worker_command(module, arguments):
        return [sys.executable, "-u", "-m", "tests.programs", module, *arguments]

    monkeypatch.setattr(launch, "torchrun_command", command)
    monkeypatch.setattr(workers, "worker_command", worker_command)
    for name, value in lender.items():
        monkeypatch.setenv(name, value)
