"""Wish 4: chains detect gaps, duplicates, foreign saves and wrong order; older states still count."""

import threading
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from cpr.checkpoint.catalog.chain import READERS, State, find_states, own_states
from cpr.checkpoint.catalog.describe import describe
from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.format.manifest import ColumnEntry, Manifest, Parent, TableEntry
from cpr.checkpoint.interop.export import export
from cpr.errors import CheckpointError, CorruptFileError
from tests.cpr.checkpoint.saves import MemoryStorage, commit, make_shard, manifest_path
from tests.cpr.checkpoint.saves import save as save_shards

TABLE = TableEntry(rows=100, cols=8, columns={"weights": ColumnEntry(dtype="float32", per_row=False)})


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def commit_chain(storage: MemoryStorage, *sequences: int, **fields) -> list[Manifest]:
    saves: list[Manifest] = []
    for sequence in sequences:
        saves.append(commit(storage, sequence, saves[-1] if saves else None, **fields))
    return saves


def sequences(states: list[State]) -> list[list[int]]:
    return [[save.sequence for save in state.saves] for state in states]


def reasons(storage: MemoryStorage, run_id: str | None = None) -> dict[int, str]:
    return {save.sequence: save.reason for save in find_states(storage, run_id)[1]}


def test_every_committed_save_is_a_state_newest_first(storage):
    base, first, second = commit_chain(storage, 0, 1, 2)
    states, rejected = find_states(storage)
    assert states == [State((base, first, second)), State((base, first)), State((base,))]
    assert rejected == []
    assert (states[0].sequence, states[0].step, states[0].newest) == (2, 20, second)


def test_two_saves_may_have_the_same_parent_after_a_fallback(storage):
    _, first, _ = commit_chain(storage, 0, 1, 2)
    commit(storage, 3, first)
    assert sequences(find_states(storage)[0]) == [[0, 1, 3], [0, 1, 2], [0, 1], [0]]


def test_a_merged_base_ranks_right_after_the_saves_it_was_made_from(storage):
    second = commit_chain(storage, 0, 1, 2)[-1]
    commit(storage, 3, second)
    commit(storage, 4, merged=(0, 1, 2), step=second.step)
    assert sequences(find_states(storage)[0]) == [[0, 1, 2, 3], [4], [0, 1, 2], [0, 1], [0]]


def test_folders_without_a_number_are_ignored(storage):
    commit_chain(storage, 0)
    storage.files["saves/lost+found/x"] = b""
    storage.files["saves/00000000.old/manifest.json"] = b"{}"
    assert sequences(find_states(storage)[0]) == [[0]]
    assert find_states(storage)[1] == []


def test_a_gap_ends_the_chain(storage):
    commit_chain(storage, 0, 1, 2, 3, 4)
    storage.delete("saves/00000002")
    assert sequences(find_states(storage)[0]) == [[0, 1], [0]]
    assert reasons(storage) == {
        3: "saves/00000003/manifest.json builds on save 2, which is missing: its rows are lost, and there is "
        "a gap",
        4: "saves/00000004/manifest.json builds on save 3, which cannot be used itself",
    }


def test_a_folder_without_a_manifest_is_an_unfinished_save(storage):
    commit_chain(storage, 0, 1, 2)
    del storage.files[manifest_path(1)]
    storage.files["saves/00000001/state.arrow"] = b"half"
    states, (newer, rejected) = find_states(storage)
    assert sequences(states) == [[0]]
    assert (rejected.sequence, rejected.unfinished, newer.unfinished) == (1, True, False)
    assert "never finished" in rejected.reason
    assert "builds on save 1, which was never finished" in newer.reason


REFUSED = {
    "other run": ({"run_id": "run-b"}, "is of run run-b, its parent, save 2, of run run-a"),
    "older step": ({"step": 19}, "is of step 19, its parent, save 2, of step 20: the order"),
    "other base": ({"base": 1}, "lies on base 1, its parent, save 2, on base 0"),
    "no parent": ({"parent": None}, "names no parent"),
    "base with a parent": ({"kind": "base", "base": 3}, "calls itself a base"),
    "later parent": ({"parent": Parent(sequence=5, digest="")}, "save 5, which comes after it: the order"),
    "no tables": ({"tables": {}}, "different models"),
    "more tables": ({"tables": {"t": TABLE, "other": TABLE}}, "different models"),
    "larger table": ({"tables": {"t": replace(TABLE, rows=101)}}, "different models"),
    "more columns": (
        {"tables": {"t": replace(TABLE, columns={**TABLE.columns, "sum": TABLE.columns["weights"]})}},
        "different models",
    ),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_save_that_does_not_fit_its_chain_is_refused(storage, fields, reason):
    *_, newest = commit_chain(storage, 0, 1, 2, tables={"t": TABLE})
    commit(storage, 3, newest, **fields)
    assert sequences(find_states(storage)[0]) == [[0, 1, 2], [0, 1], [0]]
    assert reason in reasons(storage)[3]


def fail(storage: MemoryStorage, failing: str, error: Exception) -> None:
    """From now on a method fails for the newest save."""

    def before(method: str, path: str, _: object) -> None:
        if method == failing and "saves/00000002" in path:
            raise error

    storage.before = before


@pytest.mark.parametrize("method", ["size", "read_into"])
def test_a_failing_storage_does_not_lead_to_an_older_state(storage, method):
    commit_chain(storage, 0, 1, 2)
    fail(storage, method, CheckpointError("reading failed: too many files are open"))
    with pytest.raises(CheckpointError, match="too many files are open"):
        find_states(storage)


def test_a_save_that_cannot_be_listed_is_not_treated_as_unfinished(storage):
    """Its owner would delete it."""
    commit_chain(storage, 0, 1, 2)
    fail(storage, "list", CheckpointError("listing failed: connection reset"))
    del storage.files[manifest_path(2)]
    storage.files["saves/00000002/state.arrow"] = b"half"
    with pytest.raises(CheckpointError, match="connection reset"):
        find_states(storage)


@pytest.mark.parametrize("method", ["size", "read_into"])
def test_an_unreadable_manifest_leads_to_an_older_state(storage, method):
    commit_chain(storage, 0, 1, 2)
    fail(storage, method, CorruptFileError("a bad sector"))
    assert sequences(find_states(storage)[0]) == [[0, 1], [0]]
    assert reasons(storage) == {2: "a bad sector"}


def test_a_manifest_of_another_format_is_refused(storage):
    commit_chain(storage, 0)
    storage.files[manifest_path(1)] = b'{"format": "other", "version": 3}'
    storage.files[manifest_path(2)] = b"[1, 2]"
    assert sequences(find_states(storage)[0]) == [[0]]
    assert "has format other 3" in reasons(storage)[1]
    assert f"{manifest_path(2)} is not a manifest" in reasons(storage)[2]


def test_any_flipped_bit_of_a_manifest_is_detected(storage):
    data = commit(storage, 0, tables={"t": TABLE}).to_json()
    for position in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptFileError, match=r"manifest\.json"):
            Manifest.from_json(bytes(damaged), "manifest.json")


def test_copies_of_a_save_are_refused_and_the_first_counts(storage):
    commit_chain(storage, 0, 1, 2)
    storage.files["saves/1/manifest.json"] = storage.files[manifest_path(1)]
    states, (rejected,) = find_states(storage)
    assert sequences(states)[0] == [0, 1, 2]
    assert "saves/1 is a copy" in rejected.reason
    storage.files[manifest_path(3)] = storage.files[manifest_path(1)]
    assert sequences(find_states(storage)[0])[0] == [0, 1, 2]
    assert "says that it is save 1" in reasons(storage)[3]


def test_a_save_of_another_chain_with_the_same_numbers_is_refused(storage):
    """A stranger of an earlier run: everything fits but the digest of the parent."""
    commit_chain(storage, 0, 1)
    earlier = MemoryStorage()
    commit_chain(earlier, 0, 1, 2, created="2025-12-31T00:00:00+00:00")
    storage.files[manifest_path(2)] = earlier.files[manifest_path(2)]
    assert sequences(find_states(storage)[0])[0] == [0, 1]
    assert "save 1 whose manifest has digest" in reasons(storage)[2]
    assert "stranger" in reasons(storage)[2]


def test_states_of_another_run_are_refused_when_a_run_is_named(storage):
    commit_chain(storage, 0, 1, run_id="run-a")
    commit_chain(storage, 2, run_id="run-b")
    assert sequences(find_states(storage, "run-a")[0]) == [[0, 1], [0]]
    assert "is of run run-b, not of run run-a" in reasons(storage, "run-a")[2]
    assert sequences(find_states(storage)[0]) == [[2], [0, 1], [0]]


def test_saves_of_a_second_run_in_a_directory_do_not_count(tmp_path):
    """They are not loaded, described, verified or exported."""
    storage, shard = MemoryStorage(), make_shard()
    state = {"steps_done": 0, "dense": {}, "registered": {}}
    for sequence, run_id in [(0, "run-a"), (1, "run-a"), (5, "run-b")]:
        save_shards(storage, sequence, [shard], state=state, run_id=run_id)
    states, rejected = own_states(storage)
    assert [state.sequence for state in states] == [1, 0]
    assert "is of run run-b, not of run run-a" in rejected[0].reason
    about = describe(storage, datetime.now(UTC))
    assert about is not None
    assert (about.run_id, about.chain[-1].sequence) == ("run-a", 1)
    assert "is of run run-b" in about.refused[0].reason
    verification = verify(storage)
    assert verification.newest == states[0]
    assert not verification.is_fine
    assert export(storage, "parquet", tmp_path / "out").state == states[0]


def test_counters_may_change_within_a_chain(storage):
    base = commit(storage, 0, tables={"t": TABLE})
    counted = TableEntry(rows=100, cols=8, columns=TABLE.columns, counters={"iter": 7})
    commit(storage, 1, base, tables={"t": counted})
    assert sequences(find_states(storage)[0])[0] == [0, 1]


def test_manifests_are_read_in_parallel(storage):
    """Every read waits until as many others as can be are reading too."""
    commit_chain(storage, *range(2 * READERS))
    together = threading.Barrier(READERS)
    storage.before = lambda method, *_: together.wait(timeout=30) if method == "read_into" else None
    assert len(find_states(storage)[0]) == 2 * READERS
