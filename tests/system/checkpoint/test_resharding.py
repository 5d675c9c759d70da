"""What ranks of one world size save under one sharding plan, those of every other load under every other.

All worlds work at the same time, in one folder. All tables have the same values in every save, so that every
load must give them back. An error says what does not."""

import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr import Changes
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from tests.cpr.shards.models import DIM, bags, sequences, shard

ROWS = {"a": 40, "b": 33, "c": 21, "d": 50}
UNPOOLED = {"e": 25, "f": 37}
"""Tables of an `EmbeddingCollection`."""
LAYOUTS = {
    "mixed": {"a": "tw", "b": "cw", "c": "dp", "d": "rw", "e": "dp", "f": "cw"},
    "turned": {"a": "cw", "b": "dp", "c": "rw", "d": "grid", "e": "rw", "f": "tw_last"},
    "again": {"a": "dp", "b": "twrw", "c": "tw_last", "d": "twcw", "e": "cw", "f": "rw"},
}
MORE = 9
"""Rows by which each table has grown in the end."""
TOUCHED = (0, 7, 20)
"""Rows of each table that change after the base."""
WAIT_S = 90


class Owed:
    """Each rank's part of a sum that must not change, and all of which is 1 for a start."""

    def __init__(self):
        self.part = torch.tensor([1.0 + dist.get_rank()]) / sum(range(1, dist.get_world_size() + 1))

    def state_dict(self):
        return {"part": self.part}

    def inherit(self, states):
        self.part = sum((state["part"] for state in states), torch.zeros(1))


@cache
def build(layout, more):
    """A sharded model and its optimizers, for all saves and loads under a layout: sharding takes longest."""
    pooled, unpooled = ({name: rows + more for name, rows in each.items()} for each in (ROWS, UNPOOLED))
    model = shard(LAYOUTS[layout], ebc=bags(**pooled), seq=sequences(**unpooled))
    replicated = [p for p in model.parameters() if p.numel() and not hasattr(p, "_in_backward_optimizers")]
    tables = [p for p in replicated if p.dim() == 2 and p.shape[1] == DIM and p.shape[0] != 4]
    return model, [RowWiseAdagrad(tables, lr=0.1)] if tables else []


def open_checkpointer(folder, layout, more=0):
    """Of a model sharded by this layout."""
    model, optimizers = build(layout, more)
    checkpointer = Checkpointer(model, CheckpointConfig(uri=str(folder), codec="exact"), optimizers)
    checkpointer.owed = Owed()
    checkpointer.register("owed", checkpointer.owed, per_rank=True)
    return checkpointer


def expected(shard, column, version):
    """Values of a shard's column: they tell table, row and place; `version` 1 differs in the touched rows."""
    rows = torch.arange(shard.row_offset, shard.row_offset + shard.num_rows, dtype=torch.float32)
    base = 1000 * (1 + "abcdef".index(shard.table_fqn[-1])) + rows
    if version:
        touched = torch.isin(rows, torch.tensor(TOUCHED, dtype=torch.float32))
        base = torch.where(touched, base + 0.5, base)
    if column.dim() == 1:
        return base * 2
    columns = torch.arange(shard.col_offset, shard.col_offset + shard.num_cols) / DIM / 4
    return base.unsqueeze(1) + columns


def fill(checkpointer, version):
    for each in checkpointer.shards:
        for column in each.columns.values():
            column.copy_(expected(each, column, version))


def save(folder, layout):
    checkpointer = open_checkpointer(folder, layout)
    fill(checkpointer, version=0)
    checkpointer.save("rolling")
    checkpointer.wait()
    fill(checkpointer, version=1)
    touched = torch.tensor(TOUCHED)
    checkpointer.save_rows(
        {
            each.name: touched[(touched >= each.row_offset) & (touched < each.row_offset + each.num_rows)]
            for each in checkpointer.shards
        }
    )
    checkpointer.close()


def load(folder, layout, more=0):
    """With `more`, tables have that many rows more, which stay as they are."""
    checkpointer = open_checkpointer(folder, layout, more)
    for each in checkpointer.shards:
        for column in each.columns.values():
            column.fill_(torch.nan)
    checkpointer.owed.part = torch.full((1,), torch.nan)
    loaded = checkpointer.load(changes=Changes.of("grow:*") if more else Changes())
    owed = checkpointer.owed.part.clone()
    dist.all_reduce(owed)
    torch.testing.assert_close(owed, torch.ones(1))
    assert [each.kind for each in loaded.state.saves] == ["base", "rows"]
    for each in checkpointer.shards:
        old = max(0, each.table_shape[0] - more - each.row_offset)
        for name, column in each.columns.items():
            wanted = expected(each, column, version=1)[:old]
            assert torch.equal(column[:old], wanted), (str(folder), each.name, name, column, wanted)
            assert column[old:].isnan().all(), (str(folder), each.name, name)
    checkpointer.close()


def wait_for(path):
    """Until another job has got there."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.05)


def save_and_load(folder, sizes):
    dist.init_process_group("gloo")
    own = dist.get_world_size()
    for layout in LAYOUTS:
        save(folder / f"{own}-{layout}", layout)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / f"{own}-saved").touch()
    for size in sizes:
        wait_for(folder / f"{size}-saved")
        for source in LAYOUTS:
            for layout in LAYOUTS:
                load(folder / f"{size}-{source}", layout)
        load(folder / f"{size}-mixed", "turned", MORE)
    dist.destroy_process_group()


SIZES = (1, 2, 4)


@pytest.mark.system
@pytest.mark.timeout(240)
def test_wish_2_load_at_another_world_size_and_under_another_plan(start_ranks, tmp_path):
    """Table-wise, column-wise, row-wise and data-parallel on 1, 2 and 4 ranks: 81 combinations."""
    jobs = [start_ranks(save_and_load, tmp_path, SIZES, world_size=size) for size in SIZES]
    for job in jobs:
        job.wait(timeout_s=200)
    assert len(list(tmp_path.glob("*-*/saves/00000001-*/manifest.json"))) == 9
