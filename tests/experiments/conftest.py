"""What tests of several experiments share."""

import sys

import pytest

from experiments.harness import launch
from experiments.harness.network import NoNetworkError, check_possible


@pytest.fixture
def links():
    """Skips where this machine or user cannot have links of their own."""
    try:
        check_possible()
    except NoNetworkError as error:
        pytest.skip(str(error))


@pytest.fixture
def forks(lender, monkeypatch):
    """Has torchrun, and the workers below it, start as forks of a process that has imported everything."""
    torchrun_command = launch.torchrun_command

    def command(module, arguments, processes, restarts=0):
        _, _, *torchrun = torchrun_command("tests.programs", [module, *arguments], processes, restarts)
        return [sys.executable, "-u", "-m", "tests.programs", *torchrun]

    monkeypatch.setattr(launch, "torchrun_command", command)
    for name, value in lender.items():
        monkeypatch.setenv(name, value)
