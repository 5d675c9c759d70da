"""The trainer with dynamic tables: raw ids of any log, with weights, and workers that die."""

import json
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr import Changes, CheckpointConfig, Checkpointer
from cpr.checkpoint.catalog.chain import own_states
from cpr.checkpoint.storage.base import open_storage
from cpr.cli.main import entry
from cpr.faults import AtStep, KillWorker, Plan
from data.index import IndexSchema, index
from data.index.schema import LabelColumn, SparseColumn
from dlrm.sharding.dynamic import make_dynamic
from dlrm.sharding.dynamic.index import mix
from tests.cpr.checkpoint.followers import apply, full
from tests.cpr.shards.models import bags, shard
from tests.system.training.test_resume import curve, only_folder, report_of, settings

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

STEPS = 40
MODEL = ["model.kind=deepfm", "model.top_mlp=[16,1]", "sharding.strategy=des"]
"""One whose tables are split as well."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Other people's log: no dense columns, raw ids, names with dots, lists with weights."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(1)
    for day in range(2):
        (folder / f"day={day}").mkdir()
        users, sizes = random.zipf(1.3, 1000) % 500, random.integers(0, 4, 1000)
        log = {
            "bought?": random.random(1000) < 0.1 + 0.5 * (users % 2),
            "user.id": users * 2**40 - 2**50,
            "items": [(random.integers(0, 300, size) * 7 - 2**33).tolist() for size in sizes],
            "seconds seen": [random.random(size).tolist() for size in sizes],
        }
        lists = {"items": pl.List(pl.Int64), "seconds seen": pl.List(pl.Float64)}
        pl.DataFrame(log, schema_overrides=lists).write_parquet(folder / f"day={day}" / "log.parquet")
    sparse = (
        SparseColumn(column="user.id", ids="raw"),
        SparseColumn(column="items", ids="raw", weights="seconds seen"),
    )
    index(str(folder), IndexSchema(label=LabelColumn(column="bought?"), sparse=sparse))
    return folder


@pytest.fixture
def train(start, dataset, tmp_path):
    """Trains on two ranks; the output, and the run folder."""

    def work(name, *more, **options):
        dynamic = ["tables.dynamic=['*']", "tables.dynamic_rows=256", "tables.admit_after=2"]
        run = settings(
            dataset, tmp_path / name, f"train.max_steps={STEPS}", "train.precision=fp32", *dynamic, *more
        )
        process = start("-m", "dlrm.train", *run, ranks=2, forks=True, **options)
        _, said = process.communicate(timeout=150)
        assert process.returncode == 0, said
        return said, only_folder(tmp_path / name)

    return work


def test_a_run_loses_nothing_when_a_worker_dies(train, memory, tmp_path):
    """`tests/dlrm/sharding/dynamic/test_recovery.py` shows in one process that it resumes bit for bit."""
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(Plan(schedules=(AtStep(step=25, kind=KillWorker(), target=1),)).to_json()))
    said, folder = train(
        "disturbed",
        *MODEL,
        "checkpoint.every_steps=10",
        restarts=1,
        environment={"CPR_FAULTS": str(plan), "CPR_RESIDENT_ROOT": str(memory)},
    )
    assert "table_wise, split" in said
    assert "the memory of all workers survived" in said
    assert report_of(folder)["failures"]["pls"] == 0
    assert len(curve(folder)) >= 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_increments_of_a_run_add_up_to_its_full_exports(train, memory, tmp_path):
    """With row saves of a share of the rows, of tables so small that ids are evicted all the time."""
    _, folder = train(
        "followed",
        "tables.dynamic_rows=48",
        "checkpoint.priority=mfu",
        "checkpoint.every_steps=32",
        "checkpoint.keep_last=9",
        restarts=1,
        environment={"CPR_RESIDENT_ROOT": str(memory)},
    )
    directory = folder / "checkpoint"
    states, _ = own_states(open_storage(str(directory)))
    steps = sorted({state.step for state in states})
    assert len(steps) > 3  # how many depends on how long each takes
    assert any(len(state.saves) > 1 for state in states)

    def exported(name, *words):
        assert (
            entry(["export", str(directory), "--to", "parquet", "--out", str(tmp_path / name), *words]) == 0
        )
        return tmp_path / name

    tables = full(exported("full", "--step", str(steps[0])))
    num_tombstones = 0
    for since, step in pairwise(steps):
        manifest = apply(exported(f"to {step}", "--since", str(since), "--step", str(step)), tables)
        num_tombstones += sum(table["tombstones"] for table in manifest["tables"].values())
        assert tables == full(exported(f"full {step}", "--step", str(step)))
    assert num_tombstones > 48


def test_raw_ids_need_dynamic_tables(start, dataset, tmp_path):
    process = start(
        "-m", "dlrm.train", *settings(dataset, tmp_path, "tables.dynamic=['user.id']"), forks=True
    )
    _, said = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "items has raw ids" in said


CAPACITY, BAGS = 40, 4


def build(folder, capacity):
    """Two dynamic tables, on the first and on the last rank, and their checkpointer."""
    model = shard({"d": "tw", "e": "tw_last"}, ebc=bags(d=capacity, e=capacity))
    make_dynamic(model, {"d": 1, "e": 1}, seed=5)
    return model, Checkpointer(model, CheckpointConfig(uri=str(folder / "checkpoint")))


def ids_and_rows(checkpointer):
    """What each id of each table has, on all ranks together."""
    mine = {}
    for found in checkpointer.shards:
        columns = found.columns
        used = columns["last_seen"] > 0
        rows = zip(columns["weights"][used].tolist(), columns["sum"][used].tolist(), strict=True)
        mine[found.table_name] = dict(zip(columns["id"][used].tolist(), rows, strict=True))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {table: rows for each in every for table, rows in each.items()}


def train_and_save(folder):
    dist.init_process_group("gloo")
    model, checkpointer = build(folder, CAPACITY)
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        numbers = torch.randint(0, 60, (2 * BAGS,), generator=generator)
        lengths = torch.ones(2 * BAGS, dtype=torch.int64)
        batch = KeyedJaggedTensor(keys=["f_d", "f_e"], values=mix(numbers), lengths=lengths)
        model({"ebc": batch}).square().sum().backward()
        checkpointer.step()
    checkpointer.save("consistent")
    checkpointer.wait()
    found = ids_and_rows(checkpointer)
    assert all(20 < len(rows) <= CAPACITY for rows in found.values())
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    checkpointer.close()
    check_loads(folder)
    dist.destroy_process_group()


def load_dynamic(folder):
    dist.init_process_group("gloo")
    check_loads(folder)
    dist.destroy_process_group()


def check_loads(folder):
    dist.barrier()
    wanted = torch.load(folder / "found.pt", weights_only=False)
    for capacity, changes in ((CAPACITY, Changes()), (2 * CAPACITY, Changes.of("grow:*"))):
        _, checkpointer = build(folder, capacity)
        checkpointer.load(changes=changes)
        assert ids_and_rows(checkpointer) == wanted
        checkpointer.close()


def test_ids_trained_on_four_ranks_load_on_any_number_of_ranks_and_into_larger_tables(start_ranks, tmp_path):
    start_ranks(train_and_save, tmp_path, world_size=4).wait(timeout_s=100)
    jobs = [start_ranks(load_dynamic, tmp_path, world_size=size) for size in (1, 2, 3)]
    for job in jobs:
        job.wait(timeout_s=100)
