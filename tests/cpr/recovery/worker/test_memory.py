"""Which worker claims what, and who knows that it continues a run."""

import os
import subprocess
from dataclasses import replace
from datetime import timedelta

import pytest

from cpr.errors import ResidentMemoryError
from cpr.recovery.worker.memory import WorkerMemory, is_restarted, launch_of_this_worker
from cpr.rendezvous import join
from cpr.resident.home import Home, run_key


@pytest.fixture
def agents():
    """Two processes in place of agents."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def leave(home, rank=0, world_size=1, generation=0, step=0):
    """Memory of a dead worker."""
    segment = home.create(f"rank{rank}")
    segment.status.step_finished = step
    segment.seal(session_id="s", rank=rank, world_size=world_size, generation=generation, shards=[])
    segment.release()
    return segment


def test_a_launch_is_known_by_cpr_run_or_else_by_the_agent_and_never_by_an_id_that_people_choose(monkeypatch):
    monkeypatch.delenv("CPR_LAUNCH", raising=False)
    of_parent = launch_of_this_worker()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    assert launch_of_this_worker() == of_parent
    monkeypatch.setenv("CPR_AGENT_PID", str(os.getpid()))
    assert launch_of_this_worker() not in {of_parent, ""}
    monkeypatch.setenv("CPR_LAUNCH", "of cpr run")
    assert launch_of_this_worker() == "of cpr run"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"CPR_CONTINUES": "1"}, True),
    ],
)
def test_who_continues_a_run(environment, expected):
    assert is_restarted(environment, set()) is expected


def test_memory_of_a_worker_of_the_same_agent_tells_that_the_run_continues(tmp_path, agents, monkeypatch):
    """Under `--rdzv-id` as well, where torchrun counts no restart after another agent was replaced."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("CPR_AGENT_PID", str(agents[0].pid))
    leave(Home(run_key(str(tmp_path)), tmp_path))
    worker = WorkerMemory(str(tmp_path), str(tmp_path))
    assert not worker.info().restarted
    worker.claim()
    assert worker.info().restarted
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # no torchrun: a shell started both
    assert not worker.info().restarted
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    monkeypatch.setenv("CPR_AGENT_PID", str(agents[1].pid))
    info = worker.info()
    assert info.held
    assert not info.restarted  # a later launch of the same name, which starts over
    worker.remove()


def test_memory_of_a_later_generation_comes_first_however_far_an_older_one_was(tmp_path):
    home = Home(run_key(str(tmp_path)), tmp_path)
    for generation, step in ((0, 10), (2, 6), (1, 8), (2, 7)):
        leave(home, generation=generation, step=step)
    worker = WorkerMemory(str(tmp_path), str(tmp_path))
    worker.claim()
    expected = [(2, 7), (2, 6), (1, 8), (0, 10)]
    info = worker.info()
    assert [(each.generation, each.step_finished) for each in info.held] == expected
    worker.claimed.reverse()
    worker_group = join(replace(info, restarted=True), timedelta(seconds=5))
    assert worker.settle(worker_group) is worker.claimed[0].segment
    assert [
        (each.layout.generation, each.segment.status.step_finished) for each in worker.claimed
    ] == expected
    worker.remove()


@pytest.mark.parametrize(
    ("old_ranks", "first_rank", "new_size", "claims"),
    [
        ([0, 1], 0, 2, [[0], [1]]),
        ([0, 1, 2, 3], 0, 2, [[0, 2], [1, 3]]),
        ([0, 1], 0, 3, [[0], [1], []]),
        ([2, 3], 0, 2, [[2], [3]]),  # the launcher counts nodes in another order than before
        ([3, 4], 3, 2, [[3], [4]]),  # behind a node of three
    ],
)
def test_each_segment_falls_to_one_worker_of_the_node(
    tmp_path, monkeypatch, old_ranks, first_rank, new_size, claims
):
    home = Home(run_key(str(tmp_path)), tmp_path)
    for rank in old_ranks:
        leave(home, rank, world_size=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(new_size))
    found = []
    for rank in reversed(range(new_size)):  # in whatever order they come
        monkeypatch.setenv("RANK", str(first_rank + rank))
        worker = WorkerMemory(str(tmp_path), str(tmp_path))
        worker.claim()
        assert worker.refused == []
        found.append(worker)
    assert [sorted(each.layout.rank for each in worker.claimed) for worker in reversed(found)] == claims
    assert [len(worker.info().held) for worker in reversed(found)] == [len(each) for each in claims]
    for worker in found:
        worker.remove()
    assert Home(run_key(str(tmp_path)), tmp_path).find() == ([], [])


def test_memory_of_another_run_of_the_same_name_stays_while_its_agent_lives(tmp_path, agents, monkeypatch):
    """A user starts a second torchrun with the name and directory of one that restarts its workers."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    monkeypatch.setenv("CPR_AGENT_PID", str(agents[0].pid))
    segment = leave(Home(run_key(str(tmp_path)), tmp_path))
    monkeypatch.setenv("CPR_AGENT_PID", str(agents[1].pid))
    worker = WorkerMemory(str(tmp_path), str(tmp_path))
    worker.claim()
    worker_group = join(worker.info(), timedelta(seconds=5))
    with pytest.raises(ResidentMemoryError, match=f"process {agents[0].pid}, which restarts its workers"):
        worker.settle(worker_group)
    assert segment.folder.exists()
    agents[0].kill()
    agents[0].wait()
    worker.settle(worker_group)
    assert not segment.folder.exists()
    worker.remove()
