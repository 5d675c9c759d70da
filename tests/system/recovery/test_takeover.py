"""Nodes and whole runs that were cut off or paused come back when others have continued without them.

Most of the time these runs wait for timeouts, so the stories run side by side.
"""

import functools
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import pytest

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.ownership.records import newest_owner
from cpr.checkpoint.storage.base import open_storage
from experiments.harness.network import LINK, Network, NoNetworkError, check_possible
from tests.programs import at_work
from tests.system.recovery.takeover_worker import CONTROL, MACHINE
from tests.system.runs import (
    curve,
    free_port,
    only_folder,
    report_of,
    settings,
    shared_memory,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(360)]

STEPS = 100
OPTIONS = ("train.precision=fp32", "checkpoint.every_steps=10", "data.global_batch_size=40")
UNEVALUATED = "train.evaluate_every_steps=0"
IMPATIENT = "recovery.timeout_s=6"
"""Limits how long workers wait for one that is cut off."""
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"
TORCHRUN = ("--nproc-per-node", 1, "--max-restarts", 20, "--rdzv-backend", "c10d")
SOON_S = 120.0
"""Far less than the minutes that torchrun waits for a rendezvous; it is a tenth on an idle machine."""
EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
CPR_RUN = """import sys
from cpr.cli import entry
from cpr.launch import finished
finished.IDLE_S = float(sys.argv[1])
sys.exit(entry(["run", *sys.argv[2:]]))
"""
"""`cpr run` that, without workers for some seconds, asks whether the run has finished without its node."""


class Node:
    """A torchrun, or a `cpr run`, with its own machine, memory and control."""

    def __init__(self, start, name, memory, folder):
        self._start = start
        self.memory, self._control = memory / name, folder / name
        self.memory.mkdir(mode=0o700)
        self._control.mkdir()
        self.environment = {
            "CPR_RESIDENT_ROOT": str(self.memory),
            CONTROL: str(self._control),
            MACHINE: name,
        }
        self.run, self._log, self._num_workers = None, "", 1
        self.hold(0)

    def hold(self, step):
        """Make workers wait after this step; 0: no more."""
        (self._control / "temporary").write_text(str(step))
        (self._control / "temporary").rename(self._control / "hold")

    @property
    def is_held(self):
        """Whether all its workers wait."""
        step = (self._control / "hold").read_text()
        return len(list(self._control.glob(f"held-{step}-*"))) == self._num_workers

    def linger(self):
        (self._control / "linger").touch()

    @property
    def has_ended_training(self):
        return any(self._control.glob("ended-*"))

    def train(self, *arguments):
        """Start two ranks of a torchrun of its own."""
        self._num_workers = 2
        self.run = self._start(
            "-m",
            "tests.system.recovery.takeover_worker",
            *arguments,
            ranks=2,
            restarts=30,
            environment=self.environment,
            forks=True,
        )

    def join(self, lender, torchrun, arguments, prefix=(), idle_s=10.0):
        """Start one rank of many nodes, below a `cpr run`."""
        command = (sys.executable, "-c", CPR_RUN, idle_s, "--restarts", 20, "--", sys.executable)
        worker = ("-m", "tests.programs", "tests.system.recovery.takeover_worker", *arguments)
        command = (*prefix, *command, "-m", "torch.distributed.run", *torchrun, *worker)
        environment = {**lender, **self.environment}
        self.run = self._start("-c", EXECUTE, *command, environment=environment)

    @property
    def processes(self):
        """All processes of the node; of a proxy and the fork that does its work, the fork."""
        found, new = set(), {psutil.Process(self.run.pid)}
        while new:
            found |= new
            at = {psutil.Process(at_work(each.pid)) for each in new}
            new = (at | {child for each in new for child in each.children()}) - found
        return {each for each in found if at_work(each.pid) == each.pid}

    def agent_and_workers(self):
        agent = psutil.Process(at_work(self.run.pid))
        return agent, [psutil.Process(at_work(each.pid)) for each in agent.children() if is_worker(each)]

    def send(self, signum):
        for each in self.processes:
            each.send_signal(signum)

    def wait_for(self, condition):
        """Wait until a condition holds, while the node runs."""
        deadline = time.monotonic() + 120
        while not condition():
            assert self.run.poll() is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_until_held(self, runs, saved):
        """Wait until all workers wait, and the newest save is of this step."""
        self.wait_for(lambda: self.is_held and newest_step(runs) == saved)

    def has_logged(self, text):
        os.set_blocking(self.run.stderr.fileno(), False)
        with suppress(BlockingIOError):
            while more := os.read(self.run.stderr.fileno(), 2**16):
                self._log += more.decode()
        return text in self._log

    def end(self, timeout_s=120):
        """Wait until the node has ended well; returns its log."""
        os.set_blocking(self.run.stderr.fileno(), True)
        _, log = self.run.communicate(timeout=timeout_s)
        assert self.run.returncode == 0, self._log + log
        return self._log + log


def is_worker(process):
    with suppress(psutil.NoSuchProcess):
        return "tests.system.recovery.takeover_worker" in process.cmdline()
    return False


def directory(runs):
    return open_storage(str(only_folder(runs) / "checkpoint"))


def newest_step(runs):
    states, _ = find_states(directory(runs))
    return states[0].step if states else 0


def files_of(runs):
    """Content of the checkpoint and the report, by name."""
    folder = only_folder(runs)
    paths = [*(folder / "checkpoint").rglob("*"), *folder.glob("report*")]
    return {path.relative_to(folder): path.read_bytes() for path in paths if path.is_file()}


def left_of(folder):
    """Processes of nodes below this folder."""
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(CONTROL, "").startswith(f"{folder}/"):
                yield each


@contextmanager
def nodes_in(start, folder):
    """Makes nodes; at the end, their memory must be free and all their processes gone."""
    with shared_memory() as memory:
        yield lambda name: Node(start, name, memory, folder)
        deadline = time.monotonic() + SOON_S
        while left := [path for path in memory.rglob("*") if path.is_file()] + list(left_of(folder)):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def undisturbed(start_for_all, dataset, tmp_path_factory):
    """A run without failures in the background; a function that waits for it and returns its folder."""
    runs = tmp_path_factory.mktemp("undisturbed")
    process = start_for_all("-m", "dlrm.train", *settings(dataset, runs, *OPTIONS), ranks=2, forks=True)

    def whole():
        _, log = process.communicate(timeout=150)
        assert process.returncode == 0, log
        return only_folder(runs)

    return functools.cache(whole)


@pytest.fixture(scope="module", autouse=True)
def stories(start_for_all, lender, dataset, tmp_path_factory):
    """Results of the stories with several nodes, which run in the background of the first test."""
    with ThreadPoolExecutor() as pool:
        yield {
            story: pool.submit(story, start_for_all, lender, dataset, tmp_path_factory.mktemp("nodes"))
            for story in (run_without_a_node_that_is_cut_off, run_without_a_node_that_is_paused)
        }


def test_memory_older_than_the_newest_save_or_its_owner_takes_no_run_back(
    start, dataset, undisturbed, tmp_path
):
    """One run after another loses time: to old memory, and to two successors while it is paused."""
    runs = tmp_path / "runs"
    with nodes_in(start, tmp_path) as make_node:
        run, died, finished = (make_node(name) for name in "abc")
        run.hold(23)
        run.train(*settings(dataset, runs, *OPTIONS))
        run.wait_until_held(runs, saved=20)
        bring_back = keep_memory_of_rank_1(run, tmp_path / "kept")
        run.hold(47)
        run.wait_until_held(runs, saved=40)

        # one worker returns with memory that others have left behind
        agent, workers = run.agent_and_workers()
        agent.suspend()
        for each in workers:
            each.kill()
        run.hold(46)
        bring_back()
        agent.resume()
        run.wait_until_held(runs, saved=40)
        assert run.has_logged("all workers go back to save 3 of step 40: live memory is of step 23")

        # the run is paused; a successor takes its directory, and dies before a first save
        run.send(signal.SIGSTOP)
        died.hold(43)
        died.train("--resume", only_folder(runs))
        died.wait_for(lambda: died.is_held)
        died.send(signal.SIGKILL)
        died.run.communicate()
        run.hold(75)
        run.send(signal.SIGCONT)
        run.wait_until_held(runs, saved=70)
        assert run.has_logged("has owned the directory since then")

        # the run is paused again; the next successor saves, and finishes
        run.send(signal.SIGSTOP)
        finished.hold(77)
        finished.train("--resume", only_folder(runs))
        finished.wait_until_held(runs, saved=70)
        run.hold(0)
        run.send(signal.SIGCONT)
        run.wait_for(lambda: run.has_logged("is in use by"))
        assert newest_step(runs) == 70
        finished.hold(0)
        finished.end()
        files = files_of(runs)
        log = run.end()
    assert re.search(r"save 3 of step 40: live memory .*\), but run .* has owned the directory", log)
    assert "no longer belongs to run" in log
    assert f"finished at step {STEPS}: nothing is left to train, and nothing is written" in log
    assert files_of(runs) == files
    states, _ = find_states(directory(runs))
    assert {state.newest.epoch for state in states} == {newest_owner(directory(runs)).epoch}
    folder, whole = only_folder(runs), undisturbed()
    assert without_repetitions(curve(folder)) == curve(whole)
    assert report_of(folder)["metrics"] == report_of(whole)["metrics"]
    assert report_of(folder)["steps"] == STEPS


def keep_memory_of_rank_1(node, kept):
    """Copies the memory of rank 1; the function returned puts it in the place of all memory."""
    (segment,) = (path.parent for path in node.memory.rglob("marks") if path.parent.name.startswith("rank1"))
    shutil.copytree(segment, kept)

    def bring_back():
        for each in segment.parent.iterdir():
            if each.name.startswith("rank"):
                shutil.rmtree(each)
        shutil.copytree(kept, segment)

    return bring_back


def without_repetitions(lines):
    """A run that was paused may repeat a line before it knows that another has continued."""
    return [line for at, line in enumerate(lines) if line not in lines[:at]]


def test_a_node_that_was_cut_off_learns_that_the_run_has_finished_without_it(stories):
    stories[run_without_a_node_that_is_cut_off].result()


def run_without_a_node_that_is_cut_off(start, lender, dataset, folder):
    try:
        check_possible()
    except NoNetworkError as error:
        pytest.skip(str(error))
    runs = folder / "runs"
    with Network(3) as network, nodes_in(start, folder) as make_node:

        def join(name, number):
            node = make_node(name)
            node.environment["GLOO_SOCKET_IFNAME"] = LINK
            where = (
                "--local-addr",
                network.address(number),
                "--rdzv-endpoint",
                f"{network.address(0)}:29400",
            )
            torchrun = (
                *TORCHRUN,
                "--nnodes",
                2,
                *where,
                "--rdzv-conf",
                f"is_host={number == 0},{RENDEZVOUS}",
            )
            arguments = settings(dataset, runs, *OPTIONS, UNEVALUATED, IMPATIENT)
            node.hold(33)
            node.join(lender, torchrun, arguments, network.command(number), idle_s=2.0)
            return node

        a, b = join("a", 0), join("b", 1)
        a.wait_until_held(runs, saved=30)
        network.link(1).cut()
        c = join("c", 2)
        for each in (a, b, c):
            each.hold(0)
        for each in (a, c):
            each.end()
        finished = files_of(runs)
        network.link(1).heal()
        log = b.end(timeout_s=SOON_S)
    assert f"the run has finished at step {STEPS}: nothing is left to do here" in log
    assert files_of(runs) == finished


def test_a_node_that_was_paused_joins_others_that_have_finished_and_takes_no_run_back(stories):
    stories[run_without_a_node_that_is_paused].result()


def run_without_a_node_that_is_paused(start, lender, dataset, folder):
    runs, endpoint = folder / "runs", f"localhost:{free_port()}"
    batches = "data.global_batch_size=48"  # for two ranks, and for three
    with nodes_in(start, folder) as make_node:

        def join(name, is_host=False):
            node = make_node(name)
            node.hold(33)
            where = ("--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={is_host},{RENDEZVOUS}")
            arguments = settings(dataset, runs, *OPTIONS, batches, UNEVALUATED, IMPATIENT)
            node.join(lender, (*TORCHRUN, "--nnodes", "2:3", *where), arguments)
            return node

        a, b = join("a", is_host=True), join("b")
        b.wait_for(lambda: b.is_held)
        a.wait_until_held(runs, saved=30)
        b.send(signal.SIGSTOP)
        c = join("c")
        for each in (a, c):
            each.hold(0)
            each.linger()
        for each in (a, c):
            each.wait_for(lambda each=each: each.has_ended_training)
        a.wait_for((only_folder(runs) / "report.html").exists)  # which is written last
        finished = files_of(runs)
        steps = newest_owner(directory(runs)).finished
        b.hold(0)
        b.send(signal.SIGCONT)
        log = "".join(each.end(timeout_s=SOON_S) for each in (a, b, c))
    assert f"finished at step {steps}: nothing is left to train, and nothing is written" in log
    assert files_of(runs) == finished
