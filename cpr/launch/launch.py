"""`cpr run -- torchrun ...`: starts torchrun, and starts it again when it is killed.

torchrun restarts workers that die; nobody restarts torchrun. When it is killed (out of memory, `kill -9`),
its workers go on without it: they are ended here, and a new torchrun joins the others and continues the run
with what the workers left in memory. So it is, too, when torchrun gives up because the agent that kept the
rendezvous was killed. Standard library only: it must start at once, and never be what runs out of memory.
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
"""How long workers that are told to stop may take, as torchrun has it."""
_LOOK_INTERVAL_S: Final = 0.05
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_CHILD_SUBREAPER: Final = 36
_FOLDER: Final = "cpr-run-"
"""How the name of the temporary folder begins, in which torchrun says why it failed; the tag of this process
follows."""
_RENDEZVOUS_LOST: Final = "RendezvousConnectionError"
_SETTINGS: Final = {
    # torch 2.13 sends workers to the store of an agent that is gone, unless each generation gets its own
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # a killed agent is given up after 5 s without a sign of life; torch's own 15 s are a long time to wait
    "PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=5",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `cpr run`."""
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often torchrun is started again (default: 3)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- torchrun ...", help="what to run")


def run_command(options: argparse.Namespace) -> int:
    """`cpr run`; gives torchrun's exit code, or 128 + the number of the signal that killed it."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("say what to run: cpr run -- torchrun --nproc-per-node 4 -m dlrm.train ...")
    if options.restarts < 0:
        raise ValueError(f"--restarts must be 0 or more, not {options.restarts}")
    return Launch(command, options.restarts).run()


class Launch:
    """One `cpr run`."""

    def __init__(self, command: Sequence[str], restarts: int) -> None:
        self._command, self._restarts = list(command), restarts
        self._agent: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._workers: set[Process] = set()
        self._looked_at_ticks = 0
        self._watch: FinishWatch | None = None
        self._environment = {
            **_SETTINGS,
            "PET_MAX_RESTARTS": str(restarts),  # when another agent is lost, this one restarts its workers
            **os.environ,
            "CPR_LAUNCH": uuid4().hex,
            LAUNCH_PID: str(os.getpid()),
        }

    def run(self) -> int:
        """Until torchrun ends by itself, is stopped by a signal to this process, or restarts are used up."""
        _adopt_orphans()
        before = {each: signal.getsignal(each) for each in _FORWARDED}
        for each, handler in before.items():
            if handler is not signal.SIG_IGN:  # as `nohup` asks
                signal.signal(each, self._forward)
        _remove_leftovers(Path(tempfile.gettempdir()))
        try:
            with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{Process.this().tag}-") as folder:
                self._watch = FinishWatch(Path(folder))
                self._environment[FOLDER_VARIABLE] = folder
                return self._run(Path(folder) / "error.json")
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _run(self, error_file: Path) -> int:
        environment = {"TORCHELASTIC_ERROR_FILE": str(error_file), **self._environment}
        for restart in range(self._restarts + 1):
            error_file.unlink(missing_ok=True)
            began = time.monotonic()
            pid, code = self._run_once(environment)
            cause = _cause_of_loss(code, error_file)
            num_orphans = self._end_workers()
            if code != 0 and not self._stopped and self._has_finished():
                return 0
            if self._stopped or cause is None:
                return code if code >= 0 else 128 - code
            environment["CPR_CONTINUES"] = "1"
            ended = f"; ended {num_orphans} of its workers" if num_orphans else ""
            _say(f"torchrun (process {pid}) {cause} after {time.monotonic() - began:.0f} s{ended}")
            if restart < self._restarts:
                _say(f"starting it again ({restart + 1} of {self._restarts} restarts); the run continues")
        _say(
            f"giving up: --restarts {self._restarts} are used up. The checkpoints are untouched: start the "
            "same command again to resume from the newest one, with more --restarts if this is to be expected"
        )
        return code if code >= 0 else 128 - code

    def _run_once(self, environment: dict[str, str]) -> tuple[int, int]:
        """Its pid, and its exit code as `subprocess` has it."""
        self._workers.clear()
        # in a session of its own, so that Ctrl-C reaches it once, from here
        self._agent = subprocess.Popen(self._command, env=environment, start_new_session=True)
        if self._stopped:  # by a signal that came too early to be forwarded
            self._agent.terminate()
        while self._agent.poll() is None:
            self._look()
            if self._watch is not None:
                self._watch.look(has_workers=bool(self._workers))
                if self._watch.step is not None:
                    self._end_agent(self._agent)
            time.sleep(_LOOK_INTERVAL_S)
        return self._agent.pid, self._agent.returncode

    @staticmethod
    def _end_agent(agent: subprocess.Popen[bytes]) -> None:
        """It waits for others that have finished without it."""
        agent.terminate()
        try:
            agent.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()

    def _has_finished(self) -> bool:
        """Whether the run has reached its end without this node: then the end of torchrun is no failure."""
        assert self._watch is not None
        self._watch.ask()
        self._watch.wait()
        if self._watch.step is None:
            return False
        _say(f"the run has finished at step {self._watch.step}: nothing is left to do here")
        return True

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        self._stopped = True
        if self._agent:
            self._agent.send_signal(signum)

    def _look(self) -> None:
        """Note the agent's children, for the time when it cannot be asked."""
        assert self._agent
        self._looked_at_ticks = _ticks_now()
        self._workers = {each for each in self._workers if each.is_alive} | _children(self._agent.pid)
        _bury(except_pid=self._agent.pid)

    def _end_workers(self) -> int:
        """End what the agent left behind; gives the number of workers."""
        # Its children are ours now, together with what they detached on purpose, which is to stay: a child
        # that nobody saw yet was started by the agent if it is younger than the last look.
        newborn = {each for each in _children(os.getpid()) if each.start_ticks >= self._looked_at_ticks}
        orphans = [each for each in self._workers | newborn if each.is_alive]
        _signal_all(orphans, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any(each.is_alive for each in orphans) and time.monotonic() < deadline:
            time.sleep(_LOOK_INTERVAL_S)
            _bury()
        _signal_all(orphans, signal.SIGKILL)
        _bury()
        return len(orphans)


def _signal_all(processes: Iterable[Process], signum: signal.Signals) -> None:
    """To each, and to the processes it started if it leads them as torchrun's workers do."""
    for process in processes:
        status = Status.of(process.pid)
        if status and status.process == process:
            with suppress(ProcessLookupError):
                (os.killpg if status.session == process.pid else os.kill)(process.pid, signum)


def _cause_of_loss(code: int, error_file: Path) -> str | None:
    """How the agent was lost, if it was: ends that torchrun chose itself are none."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code > 0:
        with suppress(OSError, ValueError, KeyError, TypeError):
            if str(json.loads(error_file.read_text())["message"]["message"]).startswith(_RENDEZVOUS_LOST):
                return "lost the rendezvous with the agent that kept it"
    return None


def _remove_leftovers(temporary: Path) -> None:
    """Remove the folders of earlier `cpr run` that were killed."""
    for folder in temporary.glob(f"{_FOLDER}*-*-*-*"):
        if is_tag_alive("-".join(folder.name.removeprefix(_FOLDER).split("-")[:3])) is False:
            shutil.rmtree(folder, ignore_errors=True)  # it may be another user's


def _children(pid: int) -> set[Process]:
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = map(int, (thread / "children").read_text().split())
            found |= {process for child in children if (process := Process.find(child))}
    return found


def _bury(except_pid: int | None = None) -> None:
    """Take the exit codes of adopted processes."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == except_pid:
                return  # that one is waited for by its own object
            os.waitpid(ended.si_pid, 0)


def _ticks_now() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _adopt_orphans() -> None:
    """Have descendants whose parent died become children of this process, to be found and waited for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphans (prctl)")


def _say(text: str) -> None:
    print(f"cpr run: {text}", file=sys.stderr, flush=True)
