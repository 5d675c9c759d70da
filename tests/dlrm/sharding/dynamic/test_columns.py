"""Columns with copies on the host, as for a GPU: here, both lie on the CPU."""

import pytest
import torch
from torch import tensor

from dlrm.sharding.dynamic import translation
from dlrm.sharding.dynamic.columns import HostColumns, sent
from dlrm.sharding.dynamic.table import DynamicTable, columns_of_rows
from tests.cpr.shards.models import bags, shard
from tests.dlrm.sharding.dynamic.models import SEED, build, train

CAPACITY = 48


@pytest.fixture
def copies(monkeypatch):
    """Lets columns have copies on the host, though they are there themselves."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)


def open_table(columns, weights, state):
    return DynamicTable("t", weights, [state], columns, admit_after=2, seed=SEED, initial_range=(-1.0, 1.0))


def memory():
    columns = {name: torch.zeros(CAPACITY, dtype=dtype) for name, dtype in columns_of_rows(2).items()}
    return columns, torch.zeros(CAPACITY, 4), torch.ones(CAPACITY)


def assert_same(ours, theirs):
    for name, column in theirs[0].items():
        assert torch.equal(ours[0][name], column), name
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])


def test_what_lives_elsewhere_is_as_if_it_was_decided_there(monkeypatch):
    plain, elsewhere = memory(), memory()
    one = open_table(*plain)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
        other = open_table(*elsewhere)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):  # admissions, evictions, shared counters
        ids = torch.randint(-90, 90, (30,), generator=generator)
        assert torch.equal(other.train_on(ids), one.train_on(ids))
        assert_same(elsewhere, plain)
        if step == 30:  # rows are restored, two of them of the same id
            for columns, *_ in (plain, elsewhere):
                used = (columns["last_seen"] > 0).nonzero().squeeze(1)
                columns["id"][used[0]] = columns["id"][used[1]]
            one.invalidate_index()
            other.invalidate_index()
    assert one.num_ids == other.num_ids > CAPACITY // 2


@pytest.mark.usefixtures("world_of_one", "copies")
def test_a_whole_model_trains_alike_with_one_transfer_for_all_tables_of_a_module(monkeypatch):
    reads = []
    read = translation._read
    monkeypatch.setattr(translation, "_read", lambda *given: reads.append(1) or read(*given))
    model, _ = build(CAPACITY, admit_after=2)
    outputs = train(model, range(8))
    assert len(reads) == 8
    monkeypatch.undo()  # columns without copies
    for ours, theirs in zip(outputs, train(build(CAPACITY, admit_after=2)[0], range(8)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("world_of_one")
def test_two_dynamic_tables_of_a_module_are_read_at_once(monkeypatch):
    reads = []
    read = translation._read
    monkeypatch.setattr(translation, "_read", lambda *given: reads.append(given) or read(*given))
    model = shard({"d": "tw", "s": "tw"}, ebc=bags(d=CAPACITY, s=CAPACITY))
    assert len(translation.make_dynamic(model, {"d": 1, "s": 1}, SEED)) == 2
    train(model, range(3))
    assert len(reads) == 3


def test_what_is_sent_to_a_gpu_is_page_locked_first():
    calls = []

    class Sent:
        def pin_memory(self):
            calls.append("lock")
            return self

        def to(self, device, non_blocking):
            calls.append((device.type, non_blocking))
            return "there"

    assert sent(Sent(), torch.device("cuda", 1)) == "there"
    assert calls == ["lock", ("cuda", True)]
    here = tensor([1])
    assert sent(here, torch.device("cpu")) is here


def test_columns_of_a_cpu_are_not_copied():
    live = {"id": torch.zeros(3, dtype=torch.int64)}
    columns = HostColumns(live)
    columns.write("id", tensor([1]), tensor([7]))
    assert columns["id"] is live["id"]
    assert live["id"].tolist() == [0, 7, 0]
