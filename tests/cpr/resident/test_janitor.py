"""Memory is freed after the death of the run's agent, not before, and whoever still lives keeps it."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.ownership.records import Claimant
from cpr.checkpoint.storage.base import open_storage
from cpr.processes import AGENT_PID, LAUNCH_PID, Process, pid_namespace
from cpr.resident import janitor
from cpr.resident.cleanup import RUN_FILE, note_run
from cpr.resident.cleanup import main as check_unsaved
from cpr.resident.folders import KEEPER_PREFIX, is_locked, janitor_file, live_keepers
from cpr.resident.home import Home
from cpr.resident.janitor import ensure_janitor
from tests.cpr.checkpoint.saves import commit
from tests.cpr.resident.shards import RUN, make_shard

PATIENCE_S = 60
LOOK_S, FIRST_CHECK_S = 0.2, 1.0
"""Of janitors here, which look more often than those of users."""

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """Changes the pauses of janitors, which are processes of their own."""

    def run(command, *, check, **options):
        *python, code, home = command
        before, name, _ = code.rpartition("main()")
        assert name
        pauses = f"main.__globals__.update(LOOK_S={LOOK_S}, FIRST_CHECK_S={FIRST_CHECK_S})"
        return subprocess.run([*python, f"{before}{pauses}; main()", home], check=check, **options)

    monkeypatch.setattr(janitor, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


@pytest.fixture
def agent(monkeypatch):
    """A process that stands for the run's agent."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv(LAUNCH_PID, str(process.pid))
    monkeypatch.setenv(AGENT_PID, str(process.pid))
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def watched(home, agent):
    """A home with a dead worker's memory, and its janitor."""
    segment = home.create("rank0")
    segment.seal(**RUN, shards=[make_shard(segment)])
    segment.release()
    ensure_janitor(home.folder)
    wait_until(lambda: is_locked(janitor_file(home.folder)))
    return home


def wait_until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def janitors(home):
    """Process ids of those that watch a home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(home.folder).encode() in words:
            found.append(int(process.name))
    return found


def test_it_waits_for_the_agent_and_frees_all(watched, agent, tmp_path):
    time.sleep(2 * LOOK_S)
    assert watched.folder.exists()
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(tmp_path.iterdir()))
    wait_until(lambda: janitors(watched) == [])


def test_it_waits_for_workers_that_survive_the_agent(watched, agent):
    (segment,), _ = watched.find()
    assert segment.claim()
    agent.kill()
    agent.wait()
    time.sleep(2 * LOOK_S)
    assert segment.folder.exists()
    segment.release()
    wait_until(lambda: not watched.folder.exists())


@pytest.mark.parametrize("other", [LAUNCH_PID, AGENT_PID])
def test_another_agent_of_the_run_keeps_the_memory(watched, agent, monkeypatch, other):
    """Another launcher's, or one that survives `cpr run`: it starts workers again, which have to find it."""
    monkeypatch.setenv(other, str(os.getpid()))
    ensure_janitor(watched.folder)  # while both live
    agent.kill()
    agent.wait()
    time.sleep(2 * LOOK_S)
    assert live_keepers(watched.folder) == [os.getpid()]
    assert watched.remove()


def test_there_is_one_and_it_is_not_the_workers_child(watched):
    for _ in range(3):
        ensure_janitor(watched.folder)
    (pid,) = janitors(watched)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, group, session = (int(field) for field in fields[1:4])
    assert parent != os.getpid()
    assert (group, session) == (pid, pid)
    assert {Path(f"/proc/{pid}/fd/{file}").readlink() for file in (0, 1, 2)} == {Path(os.devnull)}
    open_files = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert open_files == {Path(os.devnull), janitor_file(watched.folder)}
    assert watched.remove()
    wait_until(lambda: janitors(watched) == [])


def test_pipes_of_the_worker_end_with_it(home, agent):
    """Who reads a worker's output must see its end although the janitor lives on."""
    code = (
        "import sys; from pathlib import Path; from cpr.resident.janitor import ensure_janitor; "
        "ensure_janitor(Path(sys.argv[1]))"
    )
    worker = subprocess.run(
        [sys.executable, "-c", code, home.folder],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert (worker.stdout, worker.stderr) == (b"", b"")
    wait_until(lambda: janitors(home) != [])
    assert home.remove()
    wait_until(lambda: janitors(home) == [])


def test_agents_in_another_container_keep_the_memory_when_those_here_are_dead(watched, agent):
    theirs = watched.folder / f"{KEEPER_PREFIX}{pid_namespace() + 1}-7-1234"
    theirs.touch(0o600)
    agent.kill()
    agent.wait()
    wait_until(lambda: janitors(watched) == [])
    assert list(watched.folder.glob(f"{KEEPER_PREFIX}*")) == [theirs]  # so that theirs need not judge ours
    assert watched.find()[0]


def test_memory_whose_janitor_was_killed_goes_at_the_start_of_the_next_run(
    watched, agent, tmp_path, caplog, monkeypatch
):
    (killed,) = janitors(watched)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: Process.find(killed) is None)
    agent.kill()
    agent.wait()
    caplog.set_level(logging.INFO)
    next_home = Home("next", tmp_path)
    monkeypatch.setenv(LAUNCH_PID, str(os.getpid()))
    monkeypatch.setenv(AGENT_PID, str(os.getpid()))
    ensure_janitor(next_home.folder)
    assert not watched.folder.exists()
    assert f"a run which is over had left: {watched.folder}" in caplog.text
    assert next_home.remove()
    wait_until(lambda: janitors(next_home) == [])


@pytest.fixture
def directory(tmp_path_factory):
    """A checkpoint directory of session "session", which has saved step 10."""
    storage = open_storage(str(tmp_path_factory.mktemp("checkpoint")))
    lock = DirectoryLock(storage, "run-a", claimant=Claimant(session="session", generation=1))
    lock.acquire(list)
    commit(storage, 1, epoch=lock.epoch)
    yield storage, lock
    lock.release()


@pytest.mark.parametrize("session_id", ["session", "another"])
def test_unsaved_memory_is_kept_until_its_own_run_saves_a_later_step(watched, agent, directory, session_id):
    storage, lock = directory
    (segment,), _ = watched.find()
    segment.mark_unsaved(10)
    note_run(storage.uri, session_id, watched.folder, watched.folder)
    agent.kill()
    agent.wait()
    time.sleep(3 * LOOK_S)
    assert watched.folder.exists()
    commit(storage, 2, epoch=lock.epoch)
    if session_id == "session":
        wait_until(lambda: not watched.folder.exists())
        return
    check_unsaved(str(watched.folder / RUN_FILE))  # as the janitor asks, now and then
    assert segment.is_unsaved
    lock.finish(30)
    check_unsaved(str(watched.folder / RUN_FILE))
    wait_until(lambda: not watched.folder.exists())
