"""Wish 6: every digest is checked; damage is named by file, rows and cause, with what still loads."""

import pytest
import torch

from cpr.checkpoint.catalog.committer import delete_save
from cpr.checkpoint.catalog.verify import verify, verify_files
from cpr.checkpoint.format.manifest import save_folder
from cpr.errors import CheckpointError, CorruptFileError
from tests.cpr.checkpoint.saves import MemoryStorage, make_shard, randomise, save


@pytest.fixture
def directory():
    """A base and two row saves on it; two tables."""
    storage, generator = MemoryStorage(), torch.Generator().manual_seed(1)
    shards = [make_shard("model.a"), make_shard("model.b", shape=(40, 4), states={"exp_avg": False})]
    for shard in shards:
        randomise(shard, generator)
    newest = save(storage, 0, shards, state={"steps_done": 0, "x": torch.arange(9)})
    for sequence in (1, 2):
        ids = {shard.name: torch.arange(sequence, shard.num_rows, 7) for shard in shards}
        newest = save(storage, sequence, shards, newest, ids, state={"steps_done": sequence})
    return storage


def entries(storage):
    return [(state.newest, entry) for state in verify(storage).states for entry in state.newest.rows]


def path_of(save_, entry):
    return f"{save_folder(save_.sequence)}/{entry.path}"


def test_an_intact_directory_is_fine(directory):
    seen, totals = [], []
    result = verify(directory, seen.append, totals.append)
    assert result.is_fine
    assert result.bad == []
    assert result.num_files == 9
    assert result.newest is not None
    assert result.newest.sequence == 2
    stored = sum(len(data) for path, data in directory.files.items() if not path.endswith("manifest.json"))
    assert totals == [stored]
    assert sum(seen) == stored == result.num_bytes


def test_every_byte_of_every_file_counts(directory):
    """A flipped bit anywhere: in chunks, between them, in Arrow's header and footer, in state files."""
    for path in [path for path in directory.files if not path.endswith("manifest.json")]:
        for byte in range(0, len(directory.files[path]), 97):
            damaged = directory.copy()
            damaged.flip_bit(path, byte, byte % 8)
            result = verify(damaged)
            assert [bad.path for bad in result.bad] == [path]
            assert not result.is_fine


def test_a_flipped_bit_in_rows_is_named_by_its_rows(directory):
    base, entry = next((s, e) for s, e in entries(directory) if s.kind == "base" and e.table_fqn == "model.a")
    chunk = entry.chunks[3]
    directory.flip_bit(path_of(base, entry), chunk.offset + chunk.length - 1)
    (bad,) = verify(directory).bad
    assert f"rows {chunk.first_row} to {chunk.last_row}" in bad.cause
    assert bad.path in bad.cause
    assert bad.sequence == 0


def test_a_truncated_file_is_reported_as_cut_off(directory):
    save_, entry = entries(directory)[0]
    path = path_of(save_, entry)
    directory.files[path] = directory.files[path][:-1]
    (bad,) = verify(directory).bad
    assert f"{entry.num_bytes - 1} bytes" in bad.cause
    assert "cut off" in bad.cause


def test_verify_reports_the_newest_undamaged_state(directory):
    save_, entry = next((s, e) for s, e in entries(directory) if s.sequence == 2)
    directory.flip_bit(path_of(save_, entry), 400)
    assert verify(directory).newest.sequence == 1
    base, entry = next((s, e) for s, e in entries(directory) if s.kind == "base")
    directory.flip_bit(path_of(base, entry), 400)
    assert verify(directory).newest is None


def test_files_deleted_during_verification_are_not_damage(directory):
    generator = torch.Generator().manual_seed(2)
    shard = make_shard("model.a")
    randomise(shard, generator)
    save(directory, 3, [shard], state={"steps_done": 3})

    def retention(_):
        for sequence in (2, 1, 0):
            delete_save(directory, save_folder(sequence))

    result = verify(directory, start=retention)
    assert result.is_fine
    assert [state.sequence for state in result.states] == [3]
    assert result.newest == result.states[0]


@pytest.mark.parametrize("record", [b"", b"null", b'{"epoch": 3', b'{"epoch": "3"}'])
def test_an_unreadable_owner_record_is_damage(directory, record):
    directory.files["owners/00000003-0badf00d.json"] = record
    result = verify(directory)
    assert not result.is_fine
    assert "owners/00000003-0badf00d.json is not used, because it is damaged" in result.damaged_owners[0]
    assert result.newest.sequence == 2


def test_an_unfinished_save_is_no_damage_and_a_broken_manifest_is(directory):
    directory.files[f"{save_folder(3)}/model.a/r0-c0.arrow"] = b"half"
    assert verify(directory).is_fine
    directory.files[f"{save_folder(3)}/manifest.json"] = b"{"
    result = verify(directory)
    assert not result.is_fine
    assert result.newest.sequence == 2


def test_verify_files_raises_for_the_first_and_counts_the_others(directory):
    base = next(state.newest for state in verify(directory).states if state.newest.kind == "base")
    verify_files(directory, base, [*base.rows, *base.states])
    for entry in base.rows:
        directory.flip_bit(path_of(base, entry), 500)
    with pytest.raises(CorruptFileError, match=r"model\.a/.*and 1 more of this save"):
        verify_files(directory, base, [*base.rows, *base.states])
    verify_files(directory, base, base.states)


def test_a_failing_store_is_not_reported_as_damage(directory):
    base = next(state.newest for state in verify(directory).states if state.newest.kind == "base")
    path = path_of(base, base.rows[0])

    def failing(method, name, _):
        if name == path:
            raise CheckpointError(f"reading {name} failed: no answer")

    directory.before = failing
    with pytest.raises(CheckpointError, match="no answer") as caught:
        verify_files(directory, base, base.rows)
    assert not isinstance(caught.value, CorruptFileError)
    assert [(bad.path, bad.is_damaged) for bad in verify(directory).bad] == [(path, False)]
    directory.flip_bit(path_of(base, base.rows[1]), 500)
    with pytest.raises(CorruptFileError, match=r"model\.b/"):
        verify_files(directory, base, base.rows)
