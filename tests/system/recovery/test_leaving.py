"""Leaving the block of `PartialRecovery`, which all ranks do alike."""

import os
import sys
from datetime import timedelta

import pytest

import cpr
from cpr.checkpoint.format.manifest import Manifest
from cpr.cli.main import entry
from cpr.resident.folders import UNSAVED_FILE
from tests.cpr.shards import models

ROWS = {"a": 100, "b": 40}
TIMEOUT = timedelta(seconds=3)


def leave_alone(folder):
    os.environ |= {"CPR_LAUNCH": folder.name, "LOCAL_WORLD_SIZE": "2"}
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    recovery = cpr.PartialRecovery(str(folder / "checkpoint"), resident_root=str(memory))
    with pytest.raises(RuntimeError):  # of a collective in which the other rank is not
        train(recovery)
    assert recovery.memory_folder.is_dir(), "what nobody saved was freed"


def train(recovery):
    with recovery:
        recovery.init_process_group("gloo", TIMEOUT)
        with recovery.building():
            model = models.shard({"a": "rw", "b": "rw"}, ebc=models.bags(**ROWS))
        recovery.restore(model)
        for step in range(3):
            model({"ebc": models.batch(step, 8, **ROWS)}).square().mean().backward()
            recovery.step(samples=16)
        if recovery.worker_group.rank == 0:
            sys.exit(0)
        model({"ebc": models.batch(3, 8, **ROWS)})


@pytest.mark.system
@pytest.mark.timeout(100)
def test_one_rank_that_leaves_alone_waits_for_the_others_so_long_and_loses_nothing(
    start_ranks, tmp_path, monkeypatch
):
    start_ranks(leave_alone, tmp_path, world_size=2).wait(timeout_s=80)
    # what no process continues with can be rescued, from the memory of both
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(tmp_path / "memory"))
    (home,) = (tmp_path / "memory").glob("*/*")
    for segment in home.glob("rank*"):
        (segment / UNSAVED_FILE).touch(0o600)
    for keeper in home.glob("keeper-*"):
        keeper.unlink()
    assert entry(["rescue", "--out", str(tmp_path / "rescued")]) == 0
    (path,) = (tmp_path / "rescued").glob("saves/*/manifest.json")
    saved = Manifest.from_json(path.read_bytes(), str(path))
    assert (saved.step, saved.world_size) == (3, 2)
    assert sorted((each.table_fqn[-1], each.row_offset, each.num_rows) for each in saved.rows) == [
        ("a", 0, 50),
        ("a", 50, 50),
        ("b", 0, 20),
        ("b", 20, 20),
    ]
    assert entry(["verify", str(tmp_path / "rescued")]) == 0
