"""A fixture for runs of small processes."""

from collections.abc import Iterator

import pytest

from tests.cpr.faults.processes import FakeRun, fake_run


@pytest.fixture
def run() -> Iterator[FakeRun]:
    """Starts small runs, and kills all their processes afterwards."""
    with fake_run() as made:
        yield made
