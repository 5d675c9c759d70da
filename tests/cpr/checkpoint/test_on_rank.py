"""An error on one rank between two collectives reaches all ranks, so that none waits for ever."""

import json

import pytest
import torch

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.resolve import load_newest, on_rank_0
from cpr.checkpoint.format.part import RankPart
from cpr.errors import CheckpointError, CorruptFileError, SaveFailedError
from cpr.recovery.worker import memory as replicated
from cpr.saving.cadence import FIRST_STEPS, AutoPace
from tests.cpr.checkpoint.saves import MemoryStorage, commit, make_shard, save
from tests.cpr.checkpoint.world import committer_of, run_ranks


def failing(error):
    def work(*_):
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (CorruptFileError("torn"), CorruptFileError, "torn"),
        (ValueError("7"), ValueError, "7"),
        (json.JSONDecodeError("no JSON", "x", 0), ValueError, "no JSON: line 1"),
        (MemoryError(), CheckpointError, "MemoryError: "),
        (RecursionError("too deep"), CheckpointError, "RecursionError: too deep"),
        (KeyError("x"), CheckpointError, "KeyError: 'x'"),
    ],
)
def test_any_error_of_rank_0_is_raised_on_all_ranks(error, kind, message):
    found = run_ranks(lambda group: on_rank_0(group, failing(error)))
    assert [type(each) for each in found] == [kind, kind]
    assert all(message in str(each) for each in found)


def test_a_manifest_that_cannot_be_made_fails_the_save_on_all_ranks():
    storage = MemoryStorage()

    def work(group):
        committer_of(group, storage).commit(1, "base", RankPart(), None, failing(KeyError("model.t")))

    found = run_ranks(work)
    assert [type(each) for each in found] == [SaveFailedError, SaveFailedError]
    assert "rank 0: 'model.t'" in str(found[1])
    assert storage.files == {}


def test_an_inconsistent_manifest_is_not_committed():
    """Ranks whose files of one table have different columns."""
    storage = MemoryStorage()
    one = save(MemoryStorage(), 1, [make_shard(rows=(0, 50))])
    other = save(MemoryStorage(), 1, [make_shard(rows=(50, 100), states={})])
    both = (*one.rows, *other.rows)

    def manifest_of(_):
        return commit(MemoryStorage(), 1, tables=one.tables, rows=both)

    found = run_ranks(
        lambda group: committer_of(group, storage).commit(1, "base", RankPart(), None, manifest_of)
    )
    assert [type(each) for each in found] == [SaveFailedError, SaveFailedError]
    assert "r50-c0.arrow of a save of kind 'base' has columns" in str(found[1])
    assert storage.files == {}


def test_any_storage_error_reaches_all_ranks_before_anything_is_deleted():
    storage, shard = MemoryStorage(), make_shard()
    saves = [save(storage, sequence, [shard], state={}) for sequence in range(4)]
    before, size = dict(storage.files), storage.size

    def work(group):
        committer = committer_of(group, storage, next_sequence=4, committed=saves, chain=saves[-1:])
        committer.clean_up()

    storage.size = lambda path: failing(MemoryError("no room"))() if "state" in path else size(path)
    found = run_ranks(work)
    assert [type(each) for each in found] == [SaveFailedError, SaveFailedError]
    assert all("no room" in str(each) for each in found)
    assert storage.files == before


def test_a_load_that_fails_in_an_unexpected_way_on_one_rank_fails_on_all():
    storage = MemoryStorage()
    save(storage, 0, [make_shard()], state={})

    def work(group):
        def attempt(state: State):
            if group.rank == 1:
                raise RuntimeError("CUDA out of memory")
            return state.step

        load_newest(storage, group, attempt)

    found = run_ranks(work)
    assert [str(each) for each in found] == ["RuntimeError: CUDA out of memory"] * 2


def test_a_failed_choice_of_the_interval_reaches_all_ranks():
    class Broken:
        @property
        def history(self):
            raise ZeroDivisionError("no step")

    class Course:
        steps_done = 0

    def work(group):
        history_writer = Broken() if group.rank == 0 else None
        AutoPace(None, group, Course(), history_writer, saved_at=0).is_due(FIRST_STEPS)

    assert [str(each) for each in run_ranks(work)] == ["ZeroDivisionError: no step"] * 2


def test_a_tree_that_cannot_be_serialized_fails_on_all_ranks():
    def work(group):
        tree = {"common": object(), "own": {}, "counters": {}} if group.rank == 1 else None
        replicated.share_tree(group, tree, 1)

    assert all("common cannot be saved" in str(each) for each in run_ranks(work))


def test_a_tree_is_shared_with_all_ranks():
    def work(group):
        tree = {"common": torch.arange(3), "own": {}, "counters": {}} if group.rank == 1 else None
        return replicated.share_tree(group, tree, 1)["common"].tolist()

    assert run_ranks(work) == [[0, 1, 2]] * 2
