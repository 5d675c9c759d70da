"""Two ranks with tables of every kind list and save their own pieces."""

import pytest
import torch

from tests.system.sharding import shards_worker

DIM = 8
PREFIX = "bags.embedding_bags."


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_ranks_find_all_pieces(start_ranks, tmp_path):
    start_ranks(shards_worker.main, tmp_path / "results", world_size=2).wait(timeout_s=100)
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
