"""What holds for every test: it leaves nothing behind for the next. And what tests of whole runs share."""

import csv
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).parents[1]
GRACE_S = 5.0
"""How long a thread that was told to stop may take to do so."""

ENVIRONMENT_OF_OTHERS = {
    "PYTEST_CURRENT_TEST",  # pytest itself, around every phase of every test
    "KMP_DUPLICATE_LIB_OK",  # set by scikit-learn when it is first imported
    "KMP_INIT_AT_FORK",  # the same
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch when a first optimizer steps
}

CONFIGURED_LOGGERS = ("cpr", "data", "dlrm", "examples")
"""Loggers of which programs set the level (`dlrm.launch.process`, examples)."""

THREADS_OF_OTHERS = {"TMonitor"}
"""Classes of threads that a library starts once and keeps: tqdm's monitor."""


def pytest_configure() -> None:
    # how long an example takes, or drawing it, says only how busy the machine is
    settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no_clock")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest files first, by the time that their tests may take, so that no long one is alone at the end."""
    if not hasattr(config, "workerinput"):
        return  # one process: the order is the one in which files are found
    longest_s: Counter[Path] = Counter()
    for item in items:
        marker = item.get_closest_marker("timeout")
        longest_s[item.path] += int(marker.args[0] if marker else config.getini("timeout"))
    items.sort(key=lambda item: -longest_s[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays: looking through millions of such objects takes Python half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    leaked = []
    for thread in set(threading.enumerate()) - before:
        if type(thread).__name__ not in THREADS_OF_OTHERS:
            thread.join(GRACE_S)
            if thread.is_alive():
                leaked.append(thread.name)
    if leaked:
        pytest.fail(f"the test left threads running: {', '.join(sorted(leaked))}")


@pytest.fixture(autouse=True)
def settings_of_programs() -> Iterator[None]:
    """Programs that a test runs in this process configure signals, logging, and the limit of CSV's reader."""
    # Before the test: a fixture of its module may have run one. `dlrm.train` lets SIGINT end the process.
    # A shell starts background jobs with SIGINT ignored, too; Ctrl-C is ours to test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in CONFIGURED_LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)
    root, limit = logging.root, csv.field_size_limit()
    root.setLevel(logging.WARNING)
    handlers, level = root.handlers[:], root.level
    yield
    csv.field_size_limit(limit)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    leaked = sorted(changed - ENVIRONMENT_OF_OTHERS)
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if leaked:
        pytest.fail(f"the test left environment variables changed: {', '.join(leaked)}")


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """Fails a test that did not destroy a process group it made; one of a wider fixture may stay."""
    before = _has_process_group()
    yield
    if _has_process_group() and not before:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("the test left a process group of torch.distributed behind")


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.fixture(scope="module")
def launcher() -> Iterator[int]:
    """Pid of a process that stands for the `cpr run` of a whole file.

    Workers are prepared once for all torchruns below it: those that find it in CPR_LAUNCH_PID.
    """
    with _waiting_process() as pid:
        yield pid


@pytest.fixture(scope="session")
def lender() -> Iterator[dict[str, str]]:
    """What programs that are started by `-m tests.programs` need in their environment to start as forks."""
    from tests.programs import LENDER  # noqa: PLC0415  # only who needs it

    with _waiting_process() as pid:
        environment = {LENDER: str(pid), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        prepared = [sys.executable, "-u", "-m", "tests.programs"]  # as torchrun starts workers
        subprocess.run(prepared, env={**os.environ, **environment, "LOCAL_RANK": "0"}, check=True)
        yield environment


@contextmanager
def _waiting_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()
