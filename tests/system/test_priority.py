"""Two ranks, tables of every kind: each tracks its own pieces, and a row save writes what any rank names."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("priority_worker.py")


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_ranks_choose_what_was_looked_up_most(start, tmp_path):
    process = start(WORKER, tmp_path / "saved", ranks=2)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said[-4000:]
