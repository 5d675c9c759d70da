"""Two ranks with tables of every kind list their own pieces, and save them while one rank copies slowly."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.save import snapshot
from cpr.shards import dense_tensors, find_shards
from tests.cpr.shards.models import DIM, bags, batch, shard

LAYOUT = {
    "a": "tw",
    "b": "tw_last",
    "c": "cw",
    "d": "dp",
    "e": "unfused",
    "f": "rw",
    "g": "twrw",
    "h": "twcw",
    "i": "grid",
}
ROWS = {"a": 10, "b": 9, "c": 7, "d": 5, "e": 6, "f": 11, "g": 12, "h": 8, "i": 13}
COPY_NEXT = snapshot.Snapshot.copy_next


def described(found):
    """A shard by value."""
    return {
        "name": found.name,
        "fqn": found.table_fqn,
        "shape": found.table_shape,
        "place": (found.row_offset, found.col_offset),
        "replicated": found.replicated,
        "columns": {name: column.detach().clone() for name, column in found.columns.items()},
        "counters": {name: counter.item() for name, counter in found.counters.items()},
    }


def in_state_dict(model):
    """Pieces of this rank as TorchRec's state dict places them: (table, row, column) -> weights."""
    pieces = {}
    for name, value in model.state_dict().items():
        if ".embedding_bags." in name:
            fqn = name.removesuffix(".weight")
            if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
                pieces[fqn, 0, 0] = value.detach().clone()
                continue
            for local in value.local_shards():
                pieces[fqn, *local.metadata.shard_offsets] = local.tensor.detach().clone()
    return pieces


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad(set_to_none=False)
        features = batch(10 * step + dist.get_rank(), 8, **ROWS)
        model({"bags": features}).square().mean().backward()
        optimizer.step()


def copy_slowly(slow_rank):
    """Pieces of four rows; a thread of one rank takes its time for each, while the others train on."""
    snapshot.rows_per_piece = lambda _: 4

    def copy_next(self, buffer, step):
        if dist.get_rank() == slow_rank and threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        return COPY_NEXT(self, buffer, step)

    snapshot.Snapshot.copy_next = copy_next


def values(shards):
    return [{name: column.detach().clone() for name, column in each.columns.items()} for each in shards]


def save_while_training(model, optimizer, folder):
    """Twice, each time with another rank that the others wait for within a step."""
    with Checkpointer(model, CheckpointConfig(uri=folder), [optimizer]) as checkpointer:
        for slow_rank in range(2):
            copy_slowly(slow_rank)
            expected = values(checkpointer.shards)
            save = checkpointer.save("consistent")
            train(model, optimizer, range(3))
            if dist.get_rank() == slow_rank:
                assert save.blocked_s > 0.1, "it was waited for before rows changed"
            newer = values(checkpointer.shards)
            checkpointer.load()
            for each, loaded, before, after in zip(
                checkpointer.shards, values(checkpointer.shards), expected, newer, strict=True
            ):
                for name, column in loaded.items():
                    assert torch.equal(column, before[name]), (each.name, name)
                assert not torch.equal(loaded["weights"], after["weights"]), each.name


def list_and_save(path):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = shard(LAYOUT, bags=bags(**ROWS))
    parameters = [
        parameter
        for parameter in model.parameters()
        if parameter.numel() and not hasattr(parameter, "_in_backward_optimizers")
    ]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    shards = find_shards(model, [optimizer])
    for found in shards:  # a value that tells its place
        row = torch.arange(found.row_offset, found.row_offset + found.num_rows).unsqueeze(1)
        column = torch.arange(found.col_offset, found.col_offset + found.num_cols)
        found.weights.copy_(row * DIM + column)
    result = {"before": [described(found) for found in shards], "pieces": in_state_dict(model)}
    train(model, optimizer, range(3))
    result["after"] = [described(found) for found in shards]
    result["dense"] = {name: tensor.clone() for name, tensor in dense_tensors(model).items()}
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        torch.save(results, path)
    save_while_training(model, optimizer, f"{path}-saved")
    dist.destroy_process_group()


PREFIX = "bags.embedding_bags."


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_ranks_find_all_pieces(start_ranks, tmp_path):
    start_ranks(list_and_save, tmp_path / "results", world_size=2).wait(timeout_s=100)
    ranks = torch.load(tmp_path / "results", weights_only=False)
    layout = [{s["name"].removeprefix(PREFIX): s["replicated"] for s in rank["before"]} for rank in ranks]
    assert [{name for name, replicated in rank.items() if replicated} for rank in layout] == [{"d/r0-c0"}] * 2
    assert [rank.keys() for rank in layout] == [
        {*(f"{name}/r0-c0" for name in "acdefghi"), "i/r0-c4"},
        {"b/r0-c0", "c/r0-c4", "d/r0-c0", "f/r6-c0", "g/r6-c0", "h/r0-c4", "i/r7-c0", "i/r7-c4"},
    ]
    check_places(ranks)
    check_training(ranks)


def check_places(ranks):
    """Every element of a table is in one piece (of each rank, if replicated), where the state dict has it."""
    counts = {}
    for rank in ranks:
        assert {(s["fqn"], *s["place"]) for s in rank["before"]} == rank["pieces"].keys()
        for found in rank["before"]:
            weights, (row, column) = found["columns"]["weights"], found["place"]
            rows, columns = weights.shape
            values = torch.arange(row, row + rows).unsqueeze(1) * DIM + torch.arange(column, column + columns)
            assert torch.equal(weights, values.float())
            assert torch.equal(weights, rank["pieces"][found["fqn"], row, column])
            count = counts.setdefault(found["fqn"], torch.zeros(found["shape"], dtype=torch.int64))
            count[row : row + rows, column : column + columns] += 1
    assert counts.keys() == {f"{PREFIX}{name}" for name in "abcdefghi"}
    for fqn, count in counts.items():
        assert torch.all(count == (2 if fqn.endswith("d") else 1)), fqn


def check_training(ranks):
    """The same views show what three steps did; replicated state is equal on both ranks."""
    replicas = []
    for rank in ranks:
        assert not any(name.startswith(PREFIX) for name in rank["dense"])
        for before, after in zip(rank["before"], rank["after"], strict=True):
            is_fused = after["fqn"][-1] in "abcfghi"
            states = {"sum"} if is_fused else {"exp_avg", "exp_avg_sq"}
            assert after["columns"].keys() == {"weights", *states}
            assert before["columns"].keys() == ({"weights", "sum"} if is_fused else {"weights"})
            assert not torch.equal(after["columns"]["weights"], before["columns"]["weights"])
            assert all(torch.any(after["columns"][state] != 0) for state in states)
            assert after["counters"]["iter"] == 3
            if after["replicated"]:
                replicas.append(after["columns"])
    first, second = replicas
    assert all(torch.equal(first[name], second[name]) for name in first)
