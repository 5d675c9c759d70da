"""Faults of disks, directories and servers around a run that saves; older saves always survive."""

import errno
import json
import subprocess

import pytest
import torch

from cpr.checkpoint import checkpointer as module
from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.format.manifest import digest
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import CheckpointError, MismatchError, SaveFailedError
from cpr.faults.storages import FaultyStorage
from tests.cpr.checkpoint.runs import assert_same, flip_bit


@pytest.fixture
def mounted(tmp_path):
    """Mounts small file systems in memory."""
    folders = []

    def work(*options):
        folder = tmp_path / f"disk-{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", folder]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        folders.append(folder)
        return folder

    yield work
    for folder in folders:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def storage(monkeypatch):
    """Wraps the storage of every run that is started from now on."""
    made = []

    def work(wrapper):
        def opened(uri):
            made.append(wrapper(open_storage(uri)))
            return made[-1]

        monkeypatch.setattr(module, "open_storage", opened)
        return made

    return work


def test_a_disk_that_fills_up_fails_the_save_alone(start, mounted):
    disk = mounted("size=300k")
    run = start(disk / "checkpoint")
    run.save(1)
    saved = run.values()
    (disk / "other file").write_bytes(bytes(250_000 - sum(f.stat().st_size for f in disk.rglob("*"))))
    run.train(1)
    run.checkpointer.save("consistent")
    with pytest.raises(SaveFailedError, match=r"saves/00000001-1/.*No space left on.*free some") as caught:
        run.checkpointer.wait()
    assert "save 0 is the newest" in str(caught.value)
    (disk / "other file").unlink()
    run.checkpointer.save("consistent")  # there is room again: saving works again
    run.checkpointer.close()

    again = start(disk / "checkpoint")
    assert again.checkpointer.load().state.step == 2
    again.checkpointer.close()
    (disk / "checkpoint/saves/00000002-1/manifest.json").unlink()
    older = start(disk / "checkpoint")
    older.checkpointer.load()
    assert_same(older.values(), saved)


def test_a_read_only_directory_is_found_out_before_training(start, mounted):
    disk = mounted("size=300k")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*make it writable"):
        start(disk / "checkpoint").checkpointer.claim()


def test_a_directory_of_another_model_is_refused_before_anything_is_written(start, tmp_path):
    run = start()
    run.checkpointer.save("consistent")
    run.checkpointer.close()
    before = sorted(path for path in (tmp_path / "checkpoint/saves").rglob("*"))
    other = start(rows={"a": 100, "b": 41})
    with pytest.raises(MismatchError, match=r"41.*40|40.*41"):
        other.checkpointer.load()
    with pytest.raises(MismatchError, match="has not loaded"):
        other.checkpointer.save("consistent")
    assert sorted(path for path in (tmp_path / "checkpoint/saves").rglob("*")) == before


@pytest.mark.parametrize(
    ("operation", "path"),
    [("create", "r0-c0"), ("write", "state.arrow"), ("commit", "r0-c0"), ("commit", "manifest.json")],
)
def test_the_previous_save_survives_a_failure_at_any_operation(start, storage, operation, path):
    made = storage(FaultyStorage)
    run = start()
    run.save(1)
    saved = run.values()
    made[0].fail(operation, path, number=errno.EIO)
    run.train(1)
    run.checkpointer.save("consistent")
    with pytest.raises(SaveFailedError, match=rf"(?s)saves/00000001-1/.*{path}"):
        run.checkpointer.wait()
    run.checkpointer.close()
    again = start()
    loaded = again.checkpointer.load()
    assert (loaded.state.sequence, loaded.rejected) == (0, ())
    assert_same(again.values(), saved)


def test_a_merge_that_fails_leaves_the_chain(start, storage):
    made = storage(FaultyStorage)
    run = start(merge_after=1)
    run.checkpointer.save("consistent")
    for number in range(2):
        run.train(1)
        run.checkpointer.wait()
        if number:
            made[0].fail("create", "saves/00000003-1/ebc")
        run.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.arange(100)})
    with pytest.raises(SaveFailedError, match="saves/00000003-1"):
        run.checkpointer.save_rows({})
    assert run.checkpointer.newest_step == 2
    run.checkpointer.save_rows({})  # the chain is still the same, and is merged now
    run.checkpointer.close()
    again = start()
    loaded = again.checkpointer.load()
    assert (loaded.state.step, loaded.state.newest.kind, loaded.rejected) == (2, "base", ())


def test_a_newest_state_that_does_not_verify_keeps_older_ones_from_being_deleted(start, storage, tmp_path):
    storage(FaultyStorage)
    run = start()
    for _ in range(2):
        run.save()

    def damage(path):
        """The disk loses a bit after the save, before it is read again."""
        flip_bit(path)

    verify = run.checkpointer._committer._verify_newest

    def after_damage():
        damage(tmp_path / "checkpoint/saves/00000002-1/ebc.embedding_bags.a/r0-c0.arrow")
        verify()

    run.checkpointer._committer._verify_newest = after_damage
    run.checkpointer.save("consistent")
    with pytest.raises(SaveFailedError, match="Older saves are kept"):
        run.checkpointer.save_rows({})
    with pytest.raises(ValueError, match="needs a base"):
        run.checkpointer.save_rows({})  # nothing is built on what is damaged
    run.checkpointer.close()
    assert start().checkpointer.load().state.sequence == 1


def test_a_damaged_state_file_does_not_get_into_a_merged_base(start, tmp_path):
    run = start(merge_after=1)
    run.checkpointer.save("consistent")
    run.checkpointer.save_rows({})
    run.checkpointer.wait_until_idle()
    merge = run.checkpointer._committer._merge

    def after_damage():
        path = tmp_path / "checkpoint/saves/00000002-1/state.arrow"
        flip_bit(path)
        merge()

    run.checkpointer._committer._merge = after_damage
    run.checkpointer.save_rows({})
    with pytest.raises(SaveFailedError, match=r"00000002-1/state\.arrow differs from its digest"):
        run.checkpointer.wait_until_idle()
    run.checkpointer.close()
    assert not (tmp_path / "checkpoint/saves/00000003-1").exists()
    assert start().checkpointer.load().state.sequence == 1


def test_a_store_that_fails_for_a_moment_while_it_is_verified_costs_no_chain(start, storage):
    made = storage(FaultyStorage)
    run = start(merge_after=0)
    for _ in range(2):
        run.save()
    made[0].fail("read", ".arrow", number=errno.ECONNRESET)
    run.checkpointer.save("consistent")
    with pytest.raises(SaveFailedError, match="Older saves are kept; the next save looks again"):
        run.checkpointer.wait_until_idle()
    run.checkpointer.save_rows({})
    run.checkpointer.close()
    assert start().checkpointer.load().state.sequence == 3


def test_a_store_that_fails_for_a_moment_while_it_deletes_leaves_no_gap(start, storage, monkeypatch):
    made = storage(FaultyStorage)
    run = start(merge_after=0)
    for save in (run.checkpointer.save, lambda: run.checkpointer.save_rows({}), run.checkpointer.save):
        save()
        run.checkpointer.wait_until_idle()
    delete, failures = made[0].delete, ["once"]

    def failing(path):
        if failures and path.startswith("saves/00000001-1"):
            raise CheckpointError(f"deleting {path} failed {failures.pop()}")
        delete(path)

    monkeypatch.setattr(made[0], "delete", failing)
    run.checkpointer.save()
    run.checkpointer.wait_until_idle()
    assert not failures
    assert verify(made[0]).is_fine
    run.checkpointer.save()  # what is left goes now
    run.checkpointer.close()
    assert list(made[0].list("saves")) == ["00000003-1", "00000004-1"]


def test_row_saves_lie_on_a_base_whose_manifest_another_version_has_written(start, tmp_path):
    """Equal content, other bytes: its digest is that of the file, not of what this version would write."""
    run = start()
    run.checkpointer.save("consistent")
    run.checkpointer.close()
    path = tmp_path / "checkpoint/saves/00000000-1/manifest.json"
    body = json.loads(path.read_bytes()) | {"digest": "0" * 32}
    data = json.dumps(dict(sorted(body.items()))).encode()
    path.write_bytes(data.replace(b"0" * 32, digest(data).encode(), 1))
    again = start()
    assert again.checkpointer.load().state.sequence == 0
    again.train(1)
    again.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.tensor([1])})
    again.checkpointer.close()
    assert start().checkpointer.load().state.sequence == 1


def test_a_run_on_an_object_store(start, s3, tmp_path):
    uri = s3.uri(f"bucket/{tmp_path.name}")
    run = start(uri, merge_after=1)
    run.train(1)
    run.checkpointer.save("rolling")
    for _ in range(2):
        run.train(1)
        run.checkpointer.save_rows({shard.name: torch.tensor([1]) for shard in run.checkpointer.shards[:1]})
    run.save()
    saved = run.values()
    run.checkpointer.close()
    again = start(uri)
    assert again.checkpointer.load().state.newest.kind == "base"
    assert_same(again.values(), saved)
