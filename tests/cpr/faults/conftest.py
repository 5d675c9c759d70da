"""A fixture for runs of small processes."""

from collections.abc import Iterator

import pytest

from tests.cpr.faults.processes import FakeRun


@pytest.fixture
def run() -> Iterator[FakeRun]:
    """Starts small runs, and kills all their processes afterwards."""
    made = FakeRun()
    yield made
    made.end()
