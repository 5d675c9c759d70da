"""Executors: tasks run, errors travel, deaths are seen."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.jobs.pool import WorkerDiedError, WorkerPool
from data.jobs.tasks import Workers, local_workers

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
class Sleep:
    seconds = 50

    def run(self, report):
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Die:
    def run(self, report):
        os.kill(os.getpid(), signal.SIGKILL)


def keep_on(position, progress):
    return True


@pytest.fixture
def workers():
    with local_workers(2, "json") as workers:
        yield workers


def test_all_tasks_run_and_report(workers, tmp_path):
    seen = []
    tasks = [Touch(tmp_path / str(index)) for index in range(5)]
    workers.run(tasks, lambda position, progress: seen.append((position, progress)) or True)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    assert (tmp_path / "0").read_text() == "1"
    assert sorted(position for position, progress in seen if progress) == list(range(5))


def test_a_stop_finishes_what_runs_and_starts_nothing(workers, tmp_path):
    workers.run([Touch(tmp_path / str(index)) for index in range(9)], lambda position, progress: False)
    assert len(list(tmp_path.iterdir())) == 2


def test_tasks_run_on_any_executor(tmp_path, monkeypatch):
    monkeypatch.setenv("POLARS_MAX_THREADS", "any")
    with ThreadPoolExecutor(3) as threads:
        Workers(executor=threads, count=lambda: 3).run([Touch(tmp_path / str(i)) for i in range(9)], keep_on)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"any"}
    assert len(list(tmp_path.iterdir())) == 9


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [(Fail(), ValueError, "this input is bad"), (Die(), WorkerDiedError, "SIGKILL")],
)
def test_errors_and_deaths_are_raised_here_and_end_all_processes(task, error, words):
    started_s, processes = time.monotonic(), []

    def run():
        with local_workers(2, "json") as workers:
            processes.extend(each.process for each in workers.executor._workers)
            workers.run([Sleep(), task], keep_on)

    with pytest.raises(error, match=words):
        run()
    assert time.monotonic() - started_s < Sleep.seconds
    assert [process.poll() is None for process in processes] == [False, False]


def test_a_pool_is_an_executor_that_finishes_what_was_submitted():
    with WorkerPool(2, "json") as pool:
        later = [pool.submit(pow, 2, exponent) for exponent in range(9)]
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
    assert [future.result() for future in later] == [2**exponent for exponent in range(9)]
