"""Which worker claims what, and who knows that it continues a run."""

import pytest

from cpr.recovery import memory as module
from cpr.recovery.memory import WorkerMemory, is_restarted
from cpr.resident.home import Home, run_key


@pytest.mark.parametrize(
    ("environment", "holds", "expected"),
    [
        ({}, True, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, False, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False, False),
        ({"CPR_CONTINUES": "1"}, False, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}, True, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}, False, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "nightly"}, True, False),
    ],
)
def test_who_continues_a_run(environment, holds, expected):
    assert is_restarted(environment, holds) is expected


@pytest.mark.parametrize(
    ("old_size", "new_size", "claims"),
    [(2, 2, [[0], [1]]), (4, 2, [[0, 2], [1, 3]]), (2, 3, [[0], [1], []])],
)
def test_each_segment_falls_to_one_worker_of_the_node(tmp_path, monkeypatch, old_size, new_size, claims):
    home = Home(run_key(str(tmp_path)), tmp_path)
    for rank in range(old_size):
        segment = home.create(f"rank{rank}")
        segment.seal(session_id="s", rank=rank, world_size=old_size, generation=0, shards=[])
        segment.release()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(new_size))
    found = []
    for rank in reversed(range(new_size)):  # in whatever order they come
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        worker = WorkerMemory(str(tmp_path), str(tmp_path))
        worker.claim()
        assert worker.refused == []
        found.append(worker)
    assert [sorted(each.layout.rank for each in worker.claimed) for worker in reversed(found)] == claims
    assert [len(worker.offer().held) for worker in reversed(found)] == [len(each) for each in claims]
    for worker in found:
        worker.remove()
    assert module.Home(run_key(str(tmp_path)), tmp_path).find() == ([], [])
