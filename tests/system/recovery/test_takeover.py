"""Nodes and whole runs that were cut off or paused come back when others have gone on without them."""

import functools
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress

import psutil
import pytest

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.ownership.records import newest_owner
from cpr.checkpoint.storage.base import open_storage
from data.synthetic import SyntheticConfig, generate
from experiments.harness.network import LINK, Network, NoNetworkError, check_possible
from tests.programs import NETWORK, at_work
from tests.system.recovery.takeover_worker import CONTROL, MACHINE
from tests.system.recovery.test_launch import wait_for
from tests.system.recovery.test_rendezvous import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

STEPS, EVERY = 200, 20
IMPATIENT = "recovery.timeout_s=6"
"""Of workers that wait for one which is cut off."""
CLOCKS = {"seconds", "samples_per_s", "exchange_seconds", "exchange_share"}
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
TORCHRUN = ("--nproc-per-node", 1, "--max-restarts", 20, "--rdzv-backend", "c10d")
SOON_S = 60.0
EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "dataset"
    generate(
        SyntheticConfig(scale=1e-4, days=3, rows_per_day=2000, rows_per_block=500, rows_per_file=1000), folder
    )
    return folder


def settings(dataset, runs, *more):
    return (
        "--recipe",
        "tiny",
        "--set",
        f"data.uri={dataset}",
        f"train.run_folder={runs}",
        "data.global_batch_size=20",
        "train.precision=fp32",
        "train.log_every_steps=10",
        f"checkpoint.every_steps={EVERY}",
        *more,
    )


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
        self.run, self._said, self._num_workers = None, "", 1
        self.hold(0)

    def hold(self, step):
        """Workers wait after this step; 0: no more."""
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

    def train(self, *arguments, restarts=3):
        """Two ranks of a torchrun of its own."""
        self._num_workers = 2
        self.run = self._start(
            "-m",
            "tests.system.recovery.takeover_worker",
            *arguments,
            ranks=2,
            restarts=restarts,
            environment=self.environment,
            forks=True,
        )
        return self

    def join(self, lender, torchrun, arguments, prefix=()):
        """One rank of many nodes, below a `cpr run`."""
        command = (sys.executable, "-m", "cpr.cli", "run", "--restarts", 20, "--", sys.executable)
        worker = ("-m", "tests.programs", "tests.system.recovery.takeover_worker", *arguments)
        command = (*prefix, *command, "-m", "torch.distributed.run", *torchrun, *worker)
        environment = {**lender, **self.environment}
        self.run = self._start("-c", EXECUTE, *command, environment=environment)
        return self

    @property
    def processes(self):
        """Of the node, forks that stand behind others among them; without those that only stand for one."""
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
        """While it runs."""
        deadline = time.monotonic() + 120
        while not condition():
            assert self.run.poll() is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def heard(self, text):
        """Whether it has said this by now."""
        os.set_blocking(self.run.stderr.fileno(), False)
        with suppress(BlockingIOError):
            while more := os.read(self.run.stderr.fileno(), 2**16):
                self._said += more.decode()
        return text in self._said

    def end(self, code=0, timeout_s=120):
        """What it has said, when it has ended."""
        os.set_blocking(self.run.stderr.fileno(), True)
        _, said = self.run.communicate(timeout=timeout_s)
        assert self.run.returncode == code, self._said + said
        return self._said + said


def is_worker(process):
    with suppress(psutil.NoSuchProcess):
        return "tests.system.recovery.takeover_worker" in process.cmdline()
    return False


def only_folder(runs):
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    return folder


def directory(runs):
    return open_storage(str(only_folder(runs) / "checkpoint"))


def newest_step(runs):
    states, _ = find_states(directory(runs))
    return states[0].step if states else 0


def files_of(runs):
    """Of the checkpoint and the report, by name."""
    folder = only_folder(runs)
    paths = [*(folder / "checkpoint").rglob("*"), *folder.glob("report*")]
    return {path.relative_to(folder): path.read_bytes() for path in paths if path.is_file()}


def curve(runs):
    """What was measured, in order; a run that was paused may repeat a line before it knows of its end."""
    lines = [json.loads(line) for line in (only_folder(runs) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] in {"train", "evaluation"}]
    known = [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]
    return [line for at, line in enumerate(known) if line not in known[:at]]


def metrics_of(runs):
    return json.loads((only_folder(runs) / "report.json").read_text())["metrics"]


def is_used(memory):
    return any(path.is_file() for path in memory.rglob("*"))


def left_of(folder):
    """Processes of nodes below this folder."""
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(CONTROL, "").startswith(f"{folder}/"):
                yield each


@pytest.fixture
def make_node(start, memory, tmp_path):
    """Makes nodes; at the end, their memory is free and none of their processes is left."""
    nodes = []

    def make(name):
        nodes.append(Node(start, name, memory, tmp_path))
        return nodes[-1]

    yield make
    wait_for(lambda: not is_used(memory) and not any(left_of(tmp_path)))


@pytest.fixture(scope="module", autouse=True)
def undisturbed(start_for_all, dataset, tmp_path_factory):
    """A run that ends while others are disturbed; a function that waits for it, and its folder."""
    runs = tmp_path_factory.mktemp("undisturbed")
    process = start_for_all("-m", "dlrm.train", *settings(dataset, runs), ranks=2, forks=True)

    def whole():
        _, said = process.communicate(timeout=150)
        assert process.returncode == 0, said
        return runs

    return functools.cache(whole)


def check_equal(runs, whole):
    assert curve(runs) == curve(whole)
    assert metrics_of(runs) == metrics_of(whole)
    assert json.loads((only_folder(runs) / "report.json").read_text())["steps"] == STEPS


def test_old_memory_of_one_worker_takes_nobody_back_behind_the_newest_save(
    make_node, dataset, undisturbed, memory, tmp_path
):
    runs = tmp_path / "runs"
    node = make_node("a")
    node.hold(45)
    node.train(*settings(dataset, runs))
    node.wait_for(lambda: node.is_held and newest_step(runs) == 40)
    (segment,) = (path.parent for path in node.memory.rglob("marks") if path.parent.name.startswith("rank1"))
    shutil.copytree(segment, tmp_path / "kept")
    node.hold(95)
    node.wait_for(lambda: node.is_held and newest_step(runs) == 80)
    agent, workers = node.agent_and_workers()
    agent.suspend()
    node.hold(0)
    for each in workers:
        each.kill()
    for each in segment.parent.iterdir():
        if each.name.startswith("rank"):
            shutil.rmtree(each)
    shutil.copytree(tmp_path / "kept", segment)
    agent.resume()
    said = node.end()
    assert "all workers go back to save 3 of step 80: live memory is of step 45" in said
    check_equal(runs, undisturbed())


@pytest.fixture
def paused(make_node, dataset, tmp_path):
    """A run that was paused at step 95, when it had saved step 80."""
    runs, node = tmp_path / "runs", make_node("a")
    node.hold(95)
    node.train(*settings(dataset, runs), restarts=30)
    node.wait_for(lambda: node.is_held and newest_step(runs) == 80)
    node.send(signal.SIGSTOP)
    yield node
    if node.run.poll() is None:
        node.send(signal.SIGCONT)


def test_a_paused_run_returns_while_another_goes_on_with_it_and_again_when_that_has_finished(
    paused, make_node, undisturbed, tmp_path
):
    runs, other = tmp_path / "runs", make_node("b")
    other.hold(150)
    other.train("--resume", only_folder(runs))
    other.wait_for(lambda: other.is_held and newest_step(runs) == 140)
    paused.hold(0)
    paused.send(signal.SIGCONT)
    paused.wait_for(lambda: paused.heard("is in use by"))
    assert newest_step(runs) == 140
    other.hold(0)
    other.end()
    finished = files_of(runs)
    said = paused.end()
    assert "no longer belongs to run" in said
    assert f"finished at step {STEPS}: nothing is left to train, and nothing is written" in said
    assert files_of(runs) == finished
    states, _ = find_states(directory(runs))
    assert {state.newest.epoch for state in states} == {newest_owner(directory(runs)).epoch}
    check_equal(runs, undisturbed())


def test_a_paused_run_goes_back_to_the_newest_save_when_its_successor_died_before_it_saved(
    paused, make_node, undisturbed, tmp_path
):
    runs, other = tmp_path / "runs", make_node("b")
    other.hold(85)
    other.train("--resume", only_folder(runs))
    other.wait_for(lambda: other.is_held)
    other.send(signal.SIGKILL)
    other.run.communicate()
    paused.hold(0)
    paused.send(signal.SIGCONT)
    said = paused.end()
    assert "all workers go back to save 3 of step 80: live memory is of step" in said
    assert "has owned the directory since then" in said
    check_equal(runs, undisturbed())


@pytest.fixture
def network():
    """A network namespace for each of three nodes."""
    try:
        check_possible()
    except NoNetworkError as error:
        pytest.skip(str(error))
    with Network(3) as network:
        yield network


def test_a_node_that_was_cut_off_learns_that_the_run_has_finished_without_it(
    make_node, lender, network, dataset, tmp_path
):
    runs = tmp_path / "runs"

    def join(name, number):
        node = make_node(name)
        node.environment |= {NETWORK: f"/run/netns/{network.command(number)[-1]}", "GLOO_SOCKET_IFNAME": LINK}
        where = ("--local-addr", network.address(number), "--rdzv-endpoint", f"{network.address(0)}:29400")
        torchrun = (*TORCHRUN, "--nnodes", 2, *where, "--rdzv-conf", f"is_host={number == 0},{RENDEZVOUS}")
        return node.join(lender, torchrun, settings(dataset, runs, IMPATIENT), network.command(number))

    a, b = join("a", 0), join("b", 1)
    a.hold(65)
    b.hold(65)
    a.wait_for(lambda: a.is_held and newest_step(runs) == 60)
    network.link(1).cut()
    a.hold(0)
    b.hold(0)
    c = join("c", 2)
    for each in (a, c):
        each.end()
    finished = files_of(runs)
    network.link(1).heal()
    said = b.end(timeout_s=SOON_S)
    assert f"the run has finished at step {STEPS}: nothing is left to do here" in said
    assert files_of(runs) == finished


def test_a_node_that_was_paused_joins_others_that_have_finished_and_takes_nobody_back(
    make_node, lender, dataset, tmp_path
):
    runs, endpoint = tmp_path / "runs", f"localhost:{free_port()}"
    arguments = settings(
        dataset, runs, "data.global_batch_size=24", IMPATIENT
    )  # for two ranks, and for three

    def join(name, is_host=False):
        node = make_node(name)
        node.hold(65)
        where = ("--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={is_host},{RENDEZVOUS}")
        return node.join(lender, (*TORCHRUN, "--nnodes", "2:3", *where), arguments)

    a, b = join("a", is_host=True), join("b")
    for each in (a, b):
        each.wait_for(lambda each=each: each.is_held)
    a.wait_for(lambda: newest_step(runs) == 60)
    b.send(signal.SIGSTOP)
    c = join("c")
    for each in (a, c):
        each.hold(0)
        each.linger()
    for each in (a, c):
        each.wait_for(lambda each=each: each.has_ended_training)
    finished = files_of(runs)
    steps = newest_owner(directory(runs)).finished
    b.hold(0)
    b.send(signal.SIGCONT)
    said = "".join(each.end(timeout_s=SOON_S) for each in (a, b, c))
    assert f"finished at step {steps}: nothing is left to train, and nothing is written" in said
    assert files_of(runs) == finished
