"""Worker processes: tasks run, errors travel, deaths are seen."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.jobs.pool import WorkerDiedError, WorkerPool

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]


@dataclass(frozen=True)
class Touch:
    path: Path

    def run(self, report):
        report("half")
        self.path.write_text(os.environ["POLARS_MAX_THREADS"])


@dataclass(frozen=True)
class Fail:
    def run(self, report):
        raise ValueError("this input is bad")


@dataclass(frozen=True)
class Die:
    def run(self, report):
        os.kill(os.getpid(), signal.SIGKILL)


def keep_on(position, progress):
    return True


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2, "json") as pool:
        yield pool


def test_all_tasks_run_and_report(pool, tmp_path):
    seen = []
    tasks = [Touch(tmp_path / str(index)) for index in range(5)]
    pool.run(tasks, lambda position, progress: seen.append((position, progress)) or True)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    assert (tmp_path / "0").read_text() == "1"
    assert sorted(position for position, progress in seen if progress) == list(range(5))


def test_a_stop_finishes_what_runs_and_starts_nothing(pool, tmp_path):
    pool.run([Touch(tmp_path / str(index)) for index in range(9)], lambda position, progress: False)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_error_of_a_task_is_raised_here():
    with WorkerPool(1, "json") as pool, pytest.raises(ValueError, match="this input is bad"):
        pool.run([Fail()], keep_on)


def test_a_killed_worker_is_an_error():
    with WorkerPool(1, "json") as pool, pytest.raises(WorkerDiedError, match="SIGKILL"):
        pool.run([Die()], keep_on)
