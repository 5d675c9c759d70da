"""`cpr run -- torchrun ...`: starts torchrun, and restarts it when it is killed.

torchrun restarts workers, but no process restarts torchrun. When torchrun is killed (out of memory, or
`kill -9`), its workers continue without it: they are ended here, and a new torchrun joins the other nodes and
resumes the run from the memory that the workers left. The same happens when torchrun gives up because the
agent that hosted the rendezvous was killed. Standard library only, to start at once and need little memory.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final
from uuid import uuid4

from cpr.launch.finished import FOLDER_VARIABLE, FinishWatch
from cpr.processes import LAUNCH_PID, Process, Status, is_tag_alive

GRACE_S: Final = 30.0
"""Time for workers to stop after SIGTERM, the same as torchrun's."""
STOPPED: Final = 1
"""Exit code after workers have ended because restarts cannot help."""
_LOOK_INTERVAL_S: Final = 0.05
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_CHILD_SUBREAPER: Final = 36
_FOLDER: Final = "cpr-run-"
"""Prefix of the temporary folder's name, before the tag of this process; torchrun writes its error there."""
_RENDEZVOUS_LOST: Final = "RendezvousConnectionError"
_RENDEZVOUS_CLOSED: Final = "RendezvousClosedError"
_SETTINGS: Final = {
    # torch 2.13 sends workers to the store of an agent that is gone, unless each generation gets its own
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # detects a killed agent after 5 s instead of torch's 15 s
    "PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=5",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cpr run`."""
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often torchrun is started again (default: 3)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- torchrun ...", help="what to run")


def run_command(options: argparse.Namespace) -> int:
    """Execute `cpr run`; returns torchrun's exit code, or 128 + the number of the signal that killed it.

    0 if the run has finished without this node, and 1 if restarts cannot help its workers.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("say what to run: cpr run -- torchrun --nproc-per-node 4 -m dlrm.train ...")
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"{command[0]} is no program on PATH: install it, activate its environment, or give its path"
        )
    if options.restarts < 0:
        raise ValueError(f"--restarts must be 0 or more, not {options.restarts}")
    return AgentLauncher(command, options.restarts).run()


class AgentLauncher:
    """One `cpr run`."""

    def __init__(self, command: Sequence[str], restarts: int) -> None:
        self._command, self._restarts = list(command), restarts
        self._agent: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._workers: set[Process] = set()
        self._looked_at_ticks = 0

    def run(self) -> int:
        """Run torchrun until it ends by itself, a signal stops this process, or all restarts are used up."""
        _adopt_orphans()
        before = {each: signal.getsignal(each) for each in _FORWARDED}
        for each, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under `nohup`
                signal.signal(each, self._forward)
        _remove_leftovers(Path(tempfile.gettempdir()))
        try:
            with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{Process.this().tag}-") as folder:
                return self._run(Path(folder))
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _run(self, folder: Path) -> int:
        error_file, watch = folder / "error.json", FinishWatch(folder)
        environment = {
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            **_SETTINGS,
            "PET_MAX_RESTARTS": str(
                self._restarts
            ),  # when another agent is lost, this one restarts its workers
            **os.environ,  # the user's own settings take precedence over those above
            "CPR_LAUNCH": uuid4().hex,
            LAUNCH_PID: str(os.getpid()),
            FOLDER_VARIABLE: str(folder),
        }
        for restart in range(self._restarts + 1):
            error_file.unlink(missing_ok=True)
            began = time.monotonic()
            pid, code = self._run_once(environment, watch)
            cause = _cause_of_loss(code, error_file)
            num_orphans = self._end_workers()
            if watch.has_stopped:
                _log("the run has stopped for good, as its workers say above: restarts cannot help")
                return STOPPED
            if code != 0 and not self._stopped and (step := watch.wait_for_answer()) is not None:
                # the run finished without this node, so the end of torchrun is no failure
                _log(f"the run has finished at step {step}: nothing is left to do here")
                return 0
            if code > 0 and _error_in(error_file).startswith(_RENDEZVOUS_CLOSED):
                _log("the rendezvous is closed: the run has finished or failed on its other nodes")
            if self._stopped or cause is None:
                break
            environment["CPR_CONTINUES"] = "1"
            ended = f"; ended {num_orphans} of its workers" if num_orphans else ""
            _log(f"torchrun (process {pid}) {cause} after {time.monotonic() - began:.0f} s{ended}")
            if restart < self._restarts:
                _log(f"starting it again ({restart + 1} of {self._restarts} restarts); the run continues")
        else:
            _log(
                f"giving up: --restarts {self._restarts} are used up. The checkpoints are untouched: start "
                "the same command again to resume from the newest one, with more --restarts if this is to be "
                "expected. `cpr clean` lists what could not be saved and is still in memory; `cpr rescue` "
                "saves it"
            )
        return code if code >= 0 else 128 - code

    def _run_once(self, environment: dict[str, str], watch: FinishWatch) -> tuple[int, int]:
        """Run torchrun once; returns its pid and its exit code as in `subprocess`."""
        self._workers.clear()
        # in a session of its own, so that it receives Ctrl-C once, forwarded from here
        self._agent = agent = subprocess.Popen(self._command, env=environment, start_new_session=True)
        if self._stopped:  # by a signal that came too early to be forwarded
            agent.terminate()
        while agent.poll() is None:
            self._look()
            watch.look(has_workers=bool(self._workers))
            # torchrun would wait for nodes that have finished without it, or restart workers in vain
            if watch.step is not None or watch.has_stopped:
                agent.terminate()
                try:
                    agent.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    agent.kill()
                    agent.wait()
            time.sleep(_LOOK_INTERVAL_S)
        return agent.pid, agent.returncode

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        self._stopped = True
        if self._agent:
            self._agent.send_signal(signum)

    def _look(self) -> None:
        """Record the agent's children, which cannot be listed any more once it is dead."""
        assert self._agent
        self._looked_at_ticks = _ticks_now()
        self._workers = {each for each in self._workers if each.is_alive} | _children(self._agent.pid)
        _reap(except_pid=self._agent.pid)

    def _end_workers(self) -> int:
        """End the workers that the agent left behind; returns their number."""
        # The agent's orphans are now children of this process, and so are processes that workers detached on
        # purpose, which must stay. An unknown child is the agent's if it is younger than the last look.
        unseen = {each for each in _children(os.getpid()) if each.start_ticks >= self._looked_at_ticks}
        orphans = [each for each in self._workers | unseen if each.is_alive]
        _signal_all(orphans, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any(each.is_alive for each in orphans) and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
            _reap()
        _signal_all(orphans, signal.SIGKILL)
        _reap()
        return len(orphans)


def _signal_all(processes: Iterable[Process], signum: signal.Signals) -> None:
    """Signal processes, and their sessions if they lead one, as torchrun's workers do."""
    for process in processes:
        status = Status.of(process.pid)
        if status and status.process == process:
            with suppress(ProcessLookupError):
                (os.killpg if status.session == process.pid else os.kill)(process.pid, signum)


def _cause_of_loss(code: int, error_file: Path) -> str | None:
    """How the agent was lost; None if torchrun ended by its own decision."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code > 0 and _error_in(error_file).startswith(_RENDEZVOUS_LOST):
        return "has no connection to the rendezvous (is the agent at --rdzv-endpoint alive?)"
    return None


def _error_in(error_file: Path) -> str:
    """The error with which torchrun ended by itself; empty if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(error_file.read_text())["message"]["message"])
    return ""


def _remove_leftovers(temporary: Path) -> None:
    """Remove the folders of earlier `cpr run` that were killed."""
    for folder in temporary.glob(f"{_FOLDER}*-*-*-*"):
        if is_tag_alive("-".join(folder.name.removeprefix(_FOLDER).split("-")[:3])) is False:
            shutil.rmtree(folder, ignore_errors=True)  # it may belong to another user


def _children(pid: int) -> set[Process]:
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = map(int, (thread / "children").read_text().split())
            found |= {process for child in children if (process := Process.find(child))}
    return found


def _reap(except_pid: int | None = None) -> None:
    """Collect the exit codes of adopted processes."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == except_pid:
                return  # `subprocess` waits for that one
            os.waitpid(ended.si_pid, 0)


def _ticks_now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can find and wait for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphans (prctl)")


def _log(text: str) -> None:
    print(f"cpr run: {text}", file=sys.stderr, flush=True)
