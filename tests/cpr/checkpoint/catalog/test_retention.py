"""Retention: which saves are deleted, and that newest states survive an interrupted deletion."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.committer import Retention, delete_save
from cpr.checkpoint.format.manifest import save_folder
from tests.cpr.checkpoint.saves import MemoryStorage, commit, make_shard, manifest_path, save

START = datetime(2026, 1, 1, tzinfo=UTC)


def base(sequence, hours=0.0, **fields):
    created = (START + timedelta(hours=hours)).isoformat()
    return commit(MemoryStorage(), sequence, created=created, **fields)


def rows(sequence, parent, **fields):
    return commit(MemoryStorage(), sequence, parent, **fields)


def test_fewer_than_two_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        Retention(keep_last=1)
    with pytest.raises(ValueError, match="positive"):
        Retention(keep_every=timedelta(0))


def test_older_chains_are_deleted_from_their_end():
    first = base(0)
    second = rows(1, first)
    third = rows(2, second)
    manifests = [third, base(3), second, base(5), first]
    assert Retention().to_delete(manifests) == [2, 1, 0]
    assert Retention(keep_last=3).to_delete(manifests) == []


def test_a_chain_is_as_old_as_its_newest_state():
    old, new = base(0), base(1)
    assert Retention().to_delete([old, new, rows(2, old), base(3)]) == [1]


def test_a_merged_base_is_as_old_as_the_newest_save_it_was_made_from():
    old = base(0)
    saved_after = base(2)
    merged = base(3, merged=(0, 1))
    assert Retention().to_delete([old, rows(1, old), saved_after, merged]) == [1, 0]
    assert Retention().to_delete([old, rows(1, old), saved_after, base(4), merged]) == [1, 0, 3]


def test_keep_every_keeps_one_chain_of_each_span():
    manifests = [base(number, hours=number) for number in range(12)]
    policy = Retention(keep_every=timedelta(hours=4))
    doomed = policy.to_delete(manifests)
    assert doomed == [1, 2, 3, 5, 6, 7, 9]
    kept = [manifest for manifest in manifests if manifest.sequence not in doomed]
    assert policy.to_delete(kept) == []


def test_milestones_survive_a_clock_that_was_set_back():
    manifests = [base(number, hours=hours) for number, hours in enumerate((100, 1, 2, 6, 7, 8))]
    assert Retention(keep_every=timedelta(hours=4)).to_delete(manifests) == [2]


def test_damaged_chains_are_neither_counted_nor_deleted():
    lost = base(0)
    orphan = rows(1, lost)
    gone = rows(3, base(2))
    after_the_gap = rows(4, gone)
    manifests = [orphan, base(2), after_the_gap, base(5), base(6)]
    assert Retention().to_delete(manifests) == [2]


def histories():
    """Decisions of a run: what is saved next, and on what."""
    kinds = st.sampled_from(["base", "rows", "rows", "branch", "merge"])
    return st.lists(st.tuples(kinds, st.integers(0, 50), st.floats(-1, 9)), min_size=1, max_size=25)


def live_through(history):
    """The directory after a history without any retention; a branch comes from going on after a fall-back."""
    storage, saves, hours = MemoryStorage(), [], 0.0
    for sequence, (kind, pick, pause) in enumerate(history):
        hours += pause
        created = (START + timedelta(hours=hours)).isoformat()
        if kind == "base" or not saves:
            saves.append(commit(storage, sequence, created=created))
        elif kind == "merge":
            saves.append(commit(storage, sequence, created=created, merged=(saves[-1].sequence,)))
        else:
            parent = saves[-1] if kind == "rows" else saves[pick % len(saves)]
            saves.append(commit(storage, sequence, parent, created=created))
    return storage


@pytest.mark.system
@settings(max_examples=150)
@given(histories(), st.integers(2, 4), st.none() | st.integers(1, 12))
def test_the_two_newest_states_load_after_every_deletion(history, keep_last, every_hours):
    storage = live_through(history)
    every = timedelta(hours=every_hours) if every_hours else None
    policy = Retention(keep_last=keep_last, keep_every=every)
    before, _ = find_states(storage)
    manifests = [state.newest for state in before]
    for sequence in policy.to_delete(manifests):
        storage.delete(manifest_path(sequence))  # a kill between the two leaves garbage without a manifest
        check_newest(storage, before)
        storage.delete(save_folder(sequence))
        check_newest(storage, before)
    left, _ = find_states(storage)
    assert len({state.saves[0].sequence for state in left}) >= min(
        keep_last, len({m.base for m in manifests})
    )
    assert policy.to_delete([state.newest for state in left]) == []


def check_newest(storage, before):
    left, rejected = find_states(storage)
    assert left[:2] == before[:2]
    assert all(save.unfinished for save in rejected)
    assert {state.sequence for state in left} <= {state.sequence for state in before}


def test_the_manifest_is_deleted_before_the_files():
    """Deleting the manifest comes first, in the order that the storage sees."""
    storage, deleted = MemoryStorage(), []
    storage.before = lambda method, path, _: deleted.append(path) if method == "delete" else None
    save(storage, 0, [make_shard()])
    delete_save(storage, save_folder(0))
    assert deleted == [manifest_path(0), save_folder(0)]
    assert storage.files == {}
