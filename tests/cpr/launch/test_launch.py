"""`cpr run` with scripts of the standard library in place of torchrun."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.storage.base import open_storage
from cpr.cli.command import FAILED
from cpr.cli.main import entry
from cpr.launch.agent_launcher import STOPPED
from cpr.processes import pid_namespace
from cpr.resident.folders import UNSAVED_FILE, unsaved_segments

REPO = Path(__file__).parents[3]
START = """\
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
names = ("CPR_CONTINUES", "CPR_LAUNCH", "CPR_LAUNCH_PID", "PET_RDZV_CONF", "PET_MAX_RESTARTS",
         "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
log = folder / "agents.jsonl"
with log.open("a") as file:
    file.write(json.dumps({"pid": os.getpid(), **{name: os.environ.get(name) for name in names}}) + "\\n")
nth = len(log.read_text().splitlines())
def worker(code="import time; time.sleep(600)"):
    process = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    with (folder / "workers").open("a") as file:
        file.write(f"{process.pid}\\n")
    return process
def wait_until_seen():
    "Until `cpr run` has looked for children of this process."
    looks = folder / "looks"
    now = looks.stat().st_size if looks.exists() else 0
    while not looks.exists() or looks.stat().st_size < now + 2:  # the first may have begun before
        time.sleep(0.01)
"""
RUN = """\
import sys
from cpr import cli
from cpr.launch import agent_launcher, finished
finished.IDLE_S = 0.2
looks, agent_launcher.GRACE_S = open(sys.argv.pop(1), "ab", 0), float(sys.argv.pop(1))
look = agent_launcher.AgentLauncher._look
def look_and_note(self):
    look(self)
    looks.write(b".")
agent_launcher.AgentLauncher._look = look_and_note
raise SystemExit(cli.entry())
"""


@pytest.fixture
def cpr_run(tmp_path):
    """Starts `cpr run` with a script as torchrun; ends all its processes by pid afterwards."""
    started = []

    def work(script, *flags, grace_s=5):
        torchrun = tmp_path / "torchrun.py"
        torchrun.write_text(START + textwrap.dedent(script))
        command = [sys.executable, "-S", torchrun, tmp_path]
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, tmp_path / "looks", str(grace_s), "run", *flags, "--", *command],
            cwd=REPO,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield work
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()
    for pid in [*workers(tmp_path), *(agent["pid"] for agent in agents(tmp_path))]:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def agents(folder):
    log = folder / "agents.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def workers(folder):
    log = folder / "workers"
    return list(map(int, log.read_text().split())) if log.exists() else []


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("code", [0, 1, 17])
def test_exit_code_is_passed_on(cpr_run, tmp_path, code):
    assert cpr_run(f"sys.exit({code})").wait() == code
    assert len(agents(tmp_path)) == 1


def test_killed_agent_is_replaced_and_its_workers_are_ended(cpr_run, tmp_path):
    run = cpr_run("""
        if nth < 3:
            worker(); worker()
            if nth == 1:
                wait_until_seen()  # the second time there is no time for that
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    _, text = run.communicate()
    assert run.returncode == 0
    first, second, third = agents(tmp_path)
    assert len(workers(tmp_path)) == 4
    assert not any(map(alive, workers(tmp_path)))
    assert [each["CPR_CONTINUES"] for each in (first, second, third)] == [None, "1", "1"]
    assert len({each["CPR_LAUNCH"] for each in (first, second, third)}) == 1
    assert {each["CPR_LAUNCH_PID"] for each in (first, second, third)} == {str(run.pid)}
    assert f"torchrun (process {first['pid']}) was killed by SIGKILL" in text
    assert "ended 2 of its workers" in text
    assert "(2 of 3 restarts)" in text


def test_folder_of_a_killed_run_is_removed_by_the_next_one(cpr_run, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    killed = cpr_run("time.sleep(600)")
    wait_for(lambda: agents(tmp_path))
    killed.kill()
    killed.wait()
    (left,) = temporary.iterdir()
    of_container = temporary / f"cpr-run-{pid_namespace() + 1}-7-1234-abc"
    of_container.mkdir()
    assert cpr_run("sys.exit(0)").wait() == 0
    assert not left.exists()
    assert list(temporary.iterdir()) == [of_container]


WAITING = f"""
    sys.path.append({str(REPO)!r})
    from cpr.resident.cleanup import note_run
    (folder / "memory").mkdir(exist_ok=True)
    launcher = pathlib.Path(os.environ["CPR_LAUNCH_FOLDER"])
    note_run(str(folder / "checkpoint"), "s", folder / "memory", launcher)
    {{then}}
"""


@pytest.fixture
def owned(tmp_path):
    """Creates the checkpoint directory of a run that has finished or not."""

    def work(finished):
        lock = DirectoryLock(open_storage(str(tmp_path / "checkpoint")), "run")
        lock.acquire(list)
        if finished:
            lock.finish(500)
        lock.release()

    return work


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_node_that_returns_to_a_finished_run_ends(cpr_run, tmp_path, owned, then):
    """Its torchrun waits for nodes that will not come, or has given up, or was killed. No memory is kept."""
    owned(finished=True)
    (tmp_path / "memory" / "rank0").mkdir(parents=True)
    (tmp_path / "memory" / "rank0" / UNSAVED_FILE).touch()
    run = cpr_run(WAITING.format(then=then))
    _, text = run.communicate(timeout=60)
    assert run.returncode == 0, text
    assert "the run has finished at step 500" in text
    assert len(agents(tmp_path)) == 1
    assert not unsaved_segments(tmp_path / "memory")


def test_a_worker_that_restarts_cannot_help_stops_torchrun_when_it_has_ended(cpr_run, tmp_path):
    run = cpr_run(f"""
        sys.path.append({str(REPO)!r})
        from cpr.launch.finished import note_stopped
        if os.fork() == 0:
            note_stopped()
            wait_until_seen()
            (folder / "told").touch()  # torchrun is still there
            os._exit(1)
        time.sleep(600)
    """)
    _, text = run.communicate(timeout=60)
    assert run.returncode == STOPPED
    assert "restarts cannot help" in text
    assert (tmp_path / "told").exists()
    assert len(agents(tmp_path)) == 1


def test_torchrun_without_workers_continues_while_the_run_is_not_finished(cpr_run, tmp_path, owned):
    owned(finished=False)
    (tmp_path / "memory" / "rank0").mkdir(parents=True)
    (tmp_path / "memory" / "rank0" / UNSAVED_FILE).touch()
    run = cpr_run(WAITING.format(then="time.sleep(3); sys.exit(17)"))
    _, text = run.communicate(timeout=60)
    assert run.returncode == 17
    assert "finished" not in text
    assert unsaved_segments(tmp_path / "memory")


def test_used_up_restarts_are_reported(cpr_run, tmp_path):
    run = cpr_run("os.kill(os.getpid(), signal.SIGKILL)", "--restarts", "1")
    _, text = run.communicate()
    assert run.returncode == 128 + signal.SIGKILL
    assert len(agents(tmp_path)) == 2
    assert "giving up: --restarts 1 are used up" in text
    assert "resume from the newest" in text


def test_worker_that_ignores_sigterm_is_killed(cpr_run, tmp_path):
    run = cpr_run(
        """
        if nth == 1:
            code = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                    "print(1, flush=True); time.sleep(600)")
            process = subprocess.Popen([sys.executable, "-S", "-c", code],
                                       start_new_session=True, stdout=subprocess.PIPE)
            (folder / "workers").write_text(str(process.pid))
            process.stdout.readline()
            wait_until_seen()
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        grace_s=0.3,
    )
    assert run.wait() == 0
    assert not any(map(alive, workers(tmp_path)))


def test_detached_and_unrelated_processes_survive(cpr_run, tmp_path):
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    run = cpr_run("""
        if nth == 1:
            inner = "import time; time.sleep(600)"
            code = ("import subprocess, sys, time; "
                    f"p = subprocess.Popen([sys.executable, '-S', '-c', {inner!r}], start_new_session=True); "
                    f"open({str(folder / 'detached')!r}, 'w').write(str(p.pid)); time.sleep(600)")
            worker(code)
            while not (folder / "detached").exists() or not (folder / "detached").read_text():
                time.sleep(0.01)
            wait_until_seen()
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert run.wait() == 0
    detached = int((tmp_path / "detached").read_text())
    try:
        assert alive(detached)
        assert other.poll() is None
        assert not any(map(alive, workers(tmp_path)))
    finally:
        os.kill(detached, signal.SIGKILL)
        other.kill()
        other.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded_once(cpr_run, tmp_path, signum):
    run = cpr_run("""
        got = []
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, _: got.append(number))
        (folder / "ready").touch()
        while not got:
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(40 + got[0] if len(got) == 1 else 1)
    """)
    wait_for((tmp_path / "ready").exists)
    run.send_signal(signum)
    assert run.wait() == 40 + signum


def test_torchrun_is_not_restarted_after_a_forwarded_signal(cpr_run, tmp_path):
    run = cpr_run("worker(); (folder / 'ready').touch(); time.sleep(600)")
    wait_for((tmp_path / "ready").exists)
    run.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert len(agents(tmp_path)) == 1
    assert not any(map(alive, workers(tmp_path)))


@pytest.mark.parametrize(
    ("message", "num_agents", "says"),
    [
        ("RendezvousConnectionError: The connection to the C10d store has failed.", 2, "starting it again"),
        ("RendezvousClosedError: ", 1, "the rendezvous is closed: the run has finished or failed"),
        ("ValueError: no", 1, ""),
    ],
)
def test_agent_that_lost_the_rendezvous_is_restarted(cpr_run, tmp_path, message, num_agents, says):
    run = cpr_run(f"""
        if nth == 1:
            error = {{"message": {{"message": {message!r}}}}}
            pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
            sys.exit(1)
    """)
    _, text = run.communicate()
    assert run.returncode == 2 - num_agents
    assert says in text
    assert len(agents(tmp_path)) == num_agents


def test_settings_of_torchrun_are_defaults(cpr_run, tmp_path, monkeypatch):
    monkeypatch.setenv("PET_RDZV_CONF", "keep_alive_interval=2")
    assert cpr_run("").wait() == 0
    (agent,) = agents(tmp_path)
    assert agent["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert agent["PET_MAX_RESTARTS"] == "3"
    assert agent["PET_RDZV_CONF"] == "keep_alive_interval=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "say what to run: cpr run -- torchrun"),
        (["run", "--"], "say what to run: cpr run -- torchrun"),
        (["run", "--", "torchrum"], "torchrum is no program on PATH: install it"),
        (["run", "--restarts", "-1", "--", "true"], "--restarts must be 0 or more"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, message):
    assert entry(arguments) == FAILED
    assert message in capsys.readouterr().err


def test_cli_starts_without_heavy_imports():
    code = "import sys, cpr.cli; raise SystemExit(not {'torch', 'pyarrow', 'numpy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=REPO).returncode == 0
