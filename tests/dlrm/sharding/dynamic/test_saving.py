"""Rows of dynamic tables are loaded from checkpoints with their ids."""

import pytest
import torch

import cpr
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.shards import find_shards
from tests.cpr.recovery.workers import assert_same
from tests.dlrm.sharding.dynamic.models import build, columns_of, contents, raw_ids, train

CAPACITY, ADMIT_AFTER, NUM_IDS = 32, 2, 60
NAME = "ebc.embedding_bags.d/r0-c0"


@pytest.fixture
def start(world_of_one, tmp_path):
    opened = []

    def work():
        model, table = build(CAPACITY, ADMIT_AFTER)
        opened.append(Checkpointer(model, cpr.CheckpointConfig(uri=str(tmp_path))))
        return model, table, opened[-1]

    yield work
    for checkpointer in opened:
        checkpointer.close(abandon=True)


@pytest.mark.parametrize("in_place", [True, False], ids=["same process", "new process"])
def test_training_resumes_bit_for_bit(start, in_place):
    model, table, checkpointer = start()
    train(model, range(8))
    num_ids = table.num_ids
    checkpointer.save("consistent")
    outputs = train(model, range(8, 20))  # rows change hands while the save is under way
    checkpointer.wait()
    after = columns_of(model)
    known = set(contents(model))

    if not in_place:
        checkpointer.close()
        model, table, checkpointer = start()
    checkpointer.load()
    assert table.num_ids == num_ids
    assert not known <= set(contents(model))
    for ours, theirs in zip(train(model, range(8, 20)), outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert_same(columns_of(model), after)


def test_restored_rows_bring_their_ids_and_no_id_has_two_rows(start):
    model, table, checkpointer = start()
    train(model, range(8))
    saved = contents(model)
    checkpointer.save("consistent")
    checkpointer.wait()
    train(model, range(8, 20))
    live = contents(model)
    checkpointer.load_shards([NAME], {NAME: [(3, 17), (20, 21)]})
    ids = raw_ids(torch.arange(NUM_IDS))
    rows = table.find(ids)  # the first use after it
    mixed = contents(model)
    assert {int(each) for each in ids[rows >= 0]} == mixed.keys()
    assert {
        each: live.get(each) == mixed[each] or saved[each] == mixed[each] for each in mixed
    } == dict.fromkeys(mixed, True)
    back = [each for each in mixed if live.get(each) != mixed[each]]
    assert back
    columns = find_shards(model)[0].columns
    has_row = rows >= 0
    assert torch.equal(columns["id"][rows[has_row]], ids[has_row])
    train(model, range(20, 24))
    assert table.num_ids == len(contents(model)) <= CAPACITY
