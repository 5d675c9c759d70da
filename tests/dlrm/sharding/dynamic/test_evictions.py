"""Row saves hold the rows of evicted ids, so that a saved table has no id that training has evicted."""

import pytest
import torch

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.priority import Prioritizer, PriorityConfig
from cpr.shards import find_shards
from cpr.shards.row_ids import rows_of_ids
from tests.dlrm.sharding.dynamic.models import build, train

CAPACITY = 64
NAME = "ebc.embedding_bags.d/r0-c0"


def ids_of(columns):
    return set(columns["id"][rows_of_ids(columns["id"], columns["last_seen"])].tolist())


def test_of_rows_with_one_id_the_one_seen_last_holds_it():
    ids = torch.tensor([7, 8, 7, 9, 8, -1, 7])
    seen = torch.tensor([3, 4, 9, 0, 4, 1, 9], dtype=torch.int32)
    assert rows_of_ids(ids, seen).tolist() == [5, 2, 1]
    assert rows_of_ids(ids[:0], seen[:0]).tolist() == []


@pytest.mark.parametrize("scheme", ["mfu", "ssu", "scar", "touched", "never"])
@pytest.mark.parametrize("is_committed", [True, False])
def test_the_saved_table_has_no_evicted_id(world_of_one, tmp_path, scheme, is_committed):
    """Whatever a scheme chooses, and also if a save before has failed."""
    model, _ = build(CAPACITY)
    config = PriorityConfig(scheme=scheme, ratio=0.1, covering=1.0)
    with Checkpointer(model, CheckpointConfig(uri=str(tmp_path))) as checkpointer:
        with Prioritizer(model, config, shards=checkpointer.shards) as prioritizer:
            train(model, range(8), num_ids=90)
            prioritizer.begin_full_save()
            checkpointer.save("consistent")
            checkpointer.wait()
            prioritizer.confirm()
            columns = find_shards(model)[0].columns
            before = ids_of(columns)
            train(model, range(8, 16), num_ids=150)
            prioritizer.rows_to_save()
            assert before - ids_of(columns), "nothing was evicted"
            train(model, range(16, 20), num_ids=200)
            prioritizer.take_back()
            if is_committed:
                checkpointer.save_rows(prioritizer.rows_to_save())
                checkpointer.wait()
                prioritizer.confirm()
                train(model, range(20, 30), num_ids=250)
            checkpointer.save_rows(prioritizer.rows_to_save())
            checkpointer.wait()
            prioritizer.confirm()
            if scheme in ("touched", "never"):  # others choose rows that were not saved yet
                assert prioritizer.rows_to_save()[NAME].tolist() == []
        live = ids_of(columns)
        checkpointer.load()
        assert ids_of(find_shards(model)[0].columns) <= live


def test_watching_ends_with_the_prioritizer(world_of_one):
    model, _ = build(CAPACITY)
    prioritizer = Prioritizer(model, PriorityConfig(scheme="never", ratio=0.1, covering=1.0))
    prioritizer.forget_all()
    prioritizer.close()
    train(model, range(20), num_ids=200)
    assert prioritizer.rows_to_save()[NAME].tolist() == []
