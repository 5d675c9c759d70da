"""Two ranks, tables of every kind: each counts what all ranks looked up there, and a row save writes what any
rank names of a table that all of them hold."""

import math

import pytest
import torch
import torch.distributed as dist

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.priority import Prioritizer, PriorityConfig
from tests.cpr.shards.models import bags, batch, shard

LAYOUT = {"a": "tw", "b": "tw_last", "c": "cw", "d": "dp", "e": "unfused", "f": "rw", "g": "tw_last"}
LAYOUT |= {"h": "twrw", "i": "twcw", "j": "grid"}
ROWS = {"a": 40, "b": 36, "c": 28, "d": 20, "e": 24, "f": 44, "g": 2, "h": 33, "i": 30, "j": 35}
RATIO = 0.2
WHOLE = "deg"
"""Tables that an ordinary optimizer updates, and a small one."""
PREFIX = "bags.embedding_bags."
STEPS = 3


def train(model, step):
    """One step; the lookups of this rank's batch, by table."""
    features = batch(10 * step + dist.get_rank(), 6, **ROWS)
    model({"bags": features}).square().sum().backward()
    return [torch.bincount(features[f"f_{name}"].values(), minlength=rows) for name, rows in ROWS.items()]


def expected_rows(counts, found):
    """The rows of a piece with the highest counts, by sorting."""
    name = found.table_fqn.removeprefix(PREFIX)
    rows = range(found.row_offset, found.row_offset + found.num_rows)
    if name in WHOLE:
        return list(rows)
    ranked = sorted((-int(counts[name][row]), row) for row in rows if counts[name][row])
    return sorted(row for _, row in ranked[: math.ceil(RATIO * found.num_rows)])


def choose_rows(folder):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(LAYOUT, bags=bags(**ROWS))
    with Checkpointer(model, CheckpointConfig(uri=folder)) as checkpointer:
        prioritizer = Prioritizer(
            model, PriorityConfig(ratio=RATIO, covering=0.98), shards=checkpointer.shards
        )
        assert prioritizer.prioritised == {f"{PREFIX}{name}" for name in "abcfhij"}, "alike on all ranks"
        prioritizer.begin_full_save()
        checkpointer.save("consistent")
        checkpointer.wait()
        prioritizer.confirm()
        of_all = [sum(counts) for counts in zip(*(train(model, step) for step in range(STEPS)), strict=True)]
        for counts in of_all:
            dist.all_reduce(counts)
        counts = dict(zip(ROWS, of_all, strict=True))
        chosen = prioritizer.rows_to_save()
        for found in checkpointer.shards:
            assert chosen[found.name].tolist() == expected_rows(counts, found), found.name
        check_copies(checkpointer, chosen)
        prioritizer.confirm()
        prioritizer.close()
    dist.destroy_process_group()


def check_copies(checkpointer, chosen):
    """Of the table that all ranks hold, the rows that any rank names are saved."""
    (copy,) = [found for found in checkpointer.shards if found.replicated]
    chosen = {**chosen, copy.name: torch.tensor([dist.get_rank(), 7, 8 + dist.get_rank()])}
    copy.weights.add_(1.0)
    marked = copy.weights.clone()
    checkpointer.save_rows(chosen)
    checkpointer.wait()
    copy.weights.zero_()
    checkpointer.load()
    same = (copy.weights == marked).all(1).nonzero().view(-1).tolist()
    assert same == [0, 1, 7, 8, 9]


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_ranks_choose_what_was_looked_up_most(start_ranks, tmp_path):
    start_ranks(choose_rows, str(tmp_path / "saved"), world_size=2).wait(timeout_s=100)
