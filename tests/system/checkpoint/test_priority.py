"""Two ranks, tables of every kind: each tracks its own pieces, and a row save writes what any rank names."""

import pytest


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_ranks_choose_what_was_looked_up_most(start, tmp_path):
    process = start("-m", "tests.system.checkpoint.priority_worker", tmp_path / "saved", ranks=2, forks=True)
    _, output = process.communicate(timeout=100)
    assert process.returncode == 0, output[-4000:]
