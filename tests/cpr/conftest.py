"""Workers in a world of one."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cpr.checkpoint.runs import Run
from tests.cpr.recovery.workers import BATCH, Worker
from tests.s3_server import S3Server, s3, start_s3  # noqa: F401  # fixtures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever talks to the S3 server starts a real process, and so is a system test."""
    for item in items:
        if {"s3", "start_s3"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start(world_of_one: None, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs on one directory, or on the folder or URI given; those that are left open are closed."""
    runs = []

    def work(folder: Path | str = "checkpoint", **options: object) -> Run:
        run = Run(folder if "://" in str(folder) else tmp_path / folder, **options)
        runs.append(run)
        return run

    yield work
    for run in runs:
        run.checkpointer.close(abandon=True)


@pytest.fixture
def new_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    """Makes workers, one at a time; the last one is killed at the end."""
    memory = tmp_path / "memory"
    memory.mkdir()
    workers: list[Worker | None] = []

    def make(*, restarted: bool = True, **options: object) -> Worker:
        if restarted:
            monkeypatch.setenv("CPR_CONTINUES", "1")
        else:
            monkeypatch.delenv("CPR_CONTINUES", raising=False)
        workers.append(None)
        workers[-1] = Worker(
            options.pop("folder", tmp_path / "checkpoint"),
            memory,
            **{"save_every_steps": 5, "total_samples": 100 * BATCH, "moment": "consistent", **options},
        )
        return workers[-1]

    yield make
    if workers and workers[-1] is not None and dist.is_initialized():
        workers[-1].die()
    elif dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def wipe(tmp_path: Path) -> Callable[[], None]:
    """Loses the memory of dead workers, as a lost node does."""

    def work() -> None:
        for folder in (tmp_path / "memory").glob("*/*/*"):
            if folder.is_dir():
                shutil.rmtree(folder)

    return work
