"""A killer strikes its targets among real processes, and no others."""

import logging
import time

import pytest

from cpr.faults import (
    AtStep,
    AtTime,
    DamageFile,
    Hang,
    KillAgent,
    Killer,
    KillWorker,
    LoseNode,
    Node,
    Partition,
    PauseNode,
    Plan,
    Raise,
    Trace,
)
from cpr.faults.schedules import Event
from cpr.faults.worker_processes import find_all, find_workers, mapped_files, victim
from tests.cpr.faults.processes import python, state_of, wait_for
from tests.cpr.faults.test_damage import contents, make_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def workers_of(pid):
    return {worker.rank: worker.process for worker in find_workers(victim(pid))}


def test_only_the_target_is_killed(run):
    pid, bystander = run.agent(0, 1), run.agent(0, 1)
    before, others = workers_of(pid), workers_of(bystander)
    deed = Killer(nodes=[pid]).fire(KillWorker(), target=1)
    assert (deed.target, deed.pids, deed.note) == (1, (before[1].pid,), "")
    assert not before[1].is_alive
    assert before[0].is_alive
    assert victim(pid).is_alive
    assert workers_of(bystander) == others


def test_drawn_target_depends_on_the_seed(run):
    first, second = run.agent(0, 1, 2, 3), run.agent(0, 1, 2, 3)
    hits = [
        [Killer(nodes=[pid]).fire(KillWorker(), seed=seed).target for seed in (1, 2)]
        for pid in (first, second)
    ]
    assert hits[0] == hits[1]
    assert set(workers_of(first)) == set(workers_of(second)) == {0, 1, 2, 3} - set(hits[0])


def test_ranks_are_found_over_all_nodes(run):
    nodes = [run.agent(0, 1), run.agent(2, 3)]
    victim = workers_of(nodes[1])[2]
    assert Killer(nodes=nodes).fire(KillWorker(), target=2).pids == (victim.pid,)
    assert set(workers_of(nodes[0])) == {0, 1}


@pytest.mark.parametrize("wrapped", [False, True])
def test_agent_is_killed_with_its_workers(run, wrapped):
    nodes = [run.agent(0, 1), run.agent(2, 3, wrapped=wrapped)]
    workers = workers_of(nodes[1])
    (agent,) = {worker.agent for worker in find_workers(victim(nodes[1]))}
    deed = Killer(nodes=nodes).fire(KillAgent(), target=1)
    assert deed.pids == (agent.pid, workers[2].pid, workers[3].pid)
    assert not any(process.is_alive for process in [agent, *workers.values()])
    assert set(workers_of(nodes[0])) == {0, 1}


def test_agent_alone_leaves_orphans(run):
    pid = run.agent(0, 1)
    agent, workers = victim(pid), workers_of(pid)
    assert Killer(nodes=[pid]).fire(KillAgent(workers=False)).pids == (pid,)
    assert not agent.is_alive
    assert all(process.is_alive for process in workers.values())


HOLDS_MEMORY = """
import mmap, os, sys, time
folder = sys.argv[1] + "/run/rank" + os.environ["RANK"]
os.makedirs(folder)
with open(folder + "/tables", "w+b") as file:
    file.truncate(4096)
    tables = mmap.mmap(file.fileno(), 0)
time.sleep(60)
"""


def with_memory(run, folder, *ranks):
    """A node whose workers have mapped files in the folder."""
    folder.mkdir()
    pid = run.agent(*ranks, command=f"{python(HOLDS_MEMORY)} {folder}")
    wait_for(lambda: all(_maps(process, folder) for process in workers_of(pid).values()))
    return Node(pid=pid, memory=folder)


def _maps(process, folder):
    return any(folder in path.parents for path in mapped_files(process))


def test_lost_node_loses_only_its_own_memory(run, tmp_path):
    nodes = [with_memory(run, tmp_path / "node0", 0, 1), with_memory(run, tmp_path / "node1", 2, 3)]
    workers = workers_of(nodes[1].pid)
    deed = Killer(nodes=nodes).fire(LoseNode(), target=1)
    assert deed.pids == (nodes[1].pid, workers[2].pid, workers[3].pid)
    assert deed.note == f"wiped {tmp_path / 'node1/run'}"
    assert list((tmp_path / "node1").iterdir()) == []
    assert set(workers_of(nodes[0].pid)) == {0, 1}
    assert (tmp_path / "node0/run/rank0/tables").exists()


def test_killed_worker_loses_only_its_own_memory(run, tmp_path):
    node = with_memory(run, tmp_path / "node", 0, 1)
    deed = Killer(nodes=[node]).fire(KillWorker(wipe=True), target=1)
    assert deed.note == f"wiped {tmp_path / 'node/run/rank1'}"
    assert [path.name for path in (tmp_path / "node/run").iterdir()] == ["rank0"]
    assert Killer(nodes=[Node(pid=node.pid, memory=tmp_path)]).fire(KillWorker(), target=0).note == ""
    assert (tmp_path / "node/run/rank0/tables").exists()


def test_a_hang_begins_and_ends(run):
    pid = run.agent(0, 1)
    worker = workers_of(pid)[1]
    plan = Plan(schedules=(AtTime(time_s=0.0, kind=Hang(duration_s=3.0), target=1),))
    with Killer(plan, nodes=[pid]):
        wait_for(lambda: state_of(worker) == "T")
        wait_for(lambda: state_of(worker) == "S")


def test_paused_node_stops_and_resumes_all_processes(run):
    nodes = [run.agent(0, 1), run.agent(2, 3, wrapped=True)]
    processes = find_all(victim(nodes[1]))
    assert len(processes) == 4
    plan = Plan(schedules=(AtTime(time_s=0.0, kind=PauseNode(duration_s=3.0), target=1),))
    with Killer(plan, nodes=nodes) as killer:
        wait_for(lambda: [state_of(each) for each in processes] == ["T"] * 4)
        assert "T" not in [state_of(each) for each in find_all(victim(nodes[0]))]
        wait_for(lambda: [state_of(each) for each in processes] == ["S"] * 4)
    assert set(killer.deeds[0].pids) == {each.pid for each in processes}


def test_process_held_twice_resumes_after_the_longer_failure(run):
    pid = run.agent(0)
    agent, worker = victim(pid), workers_of(pid)[0]
    kinds = (PauseNode(duration_s=1000.0), Hang(duration_s=0.2))
    events = tuple(Event(time_s=0.0, kind=kind, target=0) for kind in kinds)
    with Killer(Plan(schedules=(Trace(events=events),)), nodes=[pid]) as killer:
        wait_for(lambda: len(killer.deeds) == 2)
        wait_for(lambda: len(killer._held) == 2)  # the hang is over
        assert [state_of(agent), state_of(worker)] == ["T", "T"]
    wait_for(lambda: state_of(worker) == "S")


class RecordingLink:
    def __init__(self):
        self.calls = []

    def cut(self):
        self.calls.append("cut")

    def heal(self):
        self.calls.append("heal")


def test_partition_is_healed_in_time_or_at_the_end(run):
    links = [RecordingLink(), RecordingLink()]
    nodes = [Node(pid=run.agent(rank), link=link) for rank, link in enumerate(links)]
    plan = Plan(schedules=(AtTime(time_s=0.0, kind=Partition(duration_s=0.2), target=1),))
    with Killer(plan, nodes=nodes) as killer:
        wait_for(lambda: links[1].calls == ["cut", "heal"])
        deed = killer.fire(Partition(duration_s=1000.0), target=0)
        assert (deed.target, deed.pids, links[0].calls) == (0, (), ["cut"])
    assert links[0].calls == ["cut", "heal"]
    assert all(workers_of(node.pid) for node in nodes)


def test_a_file_is_damaged(tmp_path, run):
    folder = make_checkpoint(tmp_path / "checkpoint")
    before = contents(folder)
    deed = Killer(nodes=[run.agent(0)], checkpoint=folder).fire(DamageFile(how="truncate"), seed=5)
    assert "cut from 200" in deed.note
    assert contents(folder) != before
    empty = Killer(nodes=[run.agent(0)], checkpoint=tmp_path / "none").fire(DamageFile())
    assert empty.note.startswith("missed: ")


def test_plan_is_carried_out_and_logged(run, caplog):
    pid = run.agent(0, restarts=True)
    first = workers_of(pid)[0]
    events = tuple(Event(time_s=time_s, kind=KillWorker(), target=0) for time_s in (0.6, 0.2))
    with (
        caplog.at_level(logging.WARNING),
        Killer(Plan(schedules=(Trace(events=events),)), nodes=[pid]) as killer,
    ):
        wait_for(lambda: len(killer.deeds) == 2)
    assert [deed.due_s for deed in killer.deeds] == [0.2, 0.6]
    assert all(deed.after_s >= deed.due_s for deed in killer.deeds)
    assert killer.deeds[0].pids == (first.pid,)
    assert killer.deeds[1].pids != (first.pid,)  # its replacement
    assert caplog.messages[0] == (
        f"failure injection: kill -9 of rank 0 (process {first.pid}) at 0.2 s, as asked for by the program"
    )


def test_failure_waits_for_its_victim_for_a_limited_time(run):
    pid = run.agent(0)
    started = time.monotonic()
    missed = Killer(nodes=[pid], patience_s=0.3).fire(KillWorker(), target=7)
    assert time.monotonic() - started >= 0.3
    assert missed.pids == ()
    assert missed.note.startswith("missed")
    assert set(workers_of(pid)) == {0}


def test_stopping_ends_a_wait_for_a_victim(run):
    plan = Plan(schedules=(AtTime(time_s=0.0, kind=KillWorker(), target=7),))
    with Killer(plan, nodes=[run.agent(0)], patience_s=1000.0) as killer:
        wait_for(killer._acting.locked)
    assert [deed.note for deed in killer.deeds] == ["missed: there was no such process"]


def test_a_node_can_be_replaced(run):
    killer = Killer(nodes=[run.agent(0)], patience_s=0.0)
    assert killer.fire(KillAgent()).pids
    assert not killer.fire(KillAgent()).pids
    replacement = run.agent(0)
    killer.replace(0, replacement)
    assert killer.fire(KillAgent()).pids[0] == replacement


def test_impossible_plans_are_refused(run, tmp_path):
    pid = run.agent(0)
    for kind, message in (
        (Raise(), "by the workers themselves"),
        (LoseNode(), "say where node 0 has it"),
        (KillWorker(wipe=True), "say where node 0 has it"),
        (DamageFile(), "give checkpoint"),
        (Partition(), "a link for each node"),
    ):
        with pytest.raises(ValueError, match=message):
            Killer(Plan(schedules=(AtTime(time_s=1, kind=kind),)), nodes=[pid])
        with pytest.raises(ValueError, match=message):
            Killer(nodes=[pid]).fire(kind)
    with pytest.raises(ValueError, match="counts steps"):
        Killer(Plan(schedules=(AtStep(step=1, kind=KillWorker()),)), nodes=[pid])
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ValueError, match="node's own"):
        Killer(nodes=[Node(pid=pid, memory=shared)]).fire(LoseNode())
    assert set(workers_of(pid)) == {0}
