"""Damage affects one file of the newest save, and wiping never removes what others own."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.faults.damage import check_wipeable, damage_newest_save, wipe


def make_checkpoint(folder):
    """Two complete saves, one that has only begun, and the lock."""
    for name, files in {
        "saves/00000001": ("manifest.json", "table/r0-c0.arrow"),
        "saves/00000002": ("manifest.json", "table/r0-c0.arrow", "state.arrow"),
        "saves/00000003": ("table/r0-c0.arrow",),
    }.items():
        for file in files:
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(range(200)))
    (folder / "saves/00000002/empty").touch()
    (folder / "LOCK").write_text("held")
    return folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(max_examples=30)
@given(how=st.sampled_from(["any", "flip", "truncate", "remove"]), seed=st.integers(0, 2**32))
def test_one_file_of_the_newest_complete_save_is_damaged(how, seed):
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        folder, twin = make_checkpoint(Path(first)), make_checkpoint(Path(second))
        before = contents(folder)
        description = damage_newest_save(folder, how, seed)
        assert damage_newest_save(twin, how, seed) == description
        after = contents(folder)
        assert contents(twin) == after
    (hit,) = {name for name in before if before[name] != after.get(name)}
    assert hit.parts[:2] == ("saves", "00000002")
    assert str(hit) in description
    if how == "remove":
        assert hit not in after
    if how == "truncate":
        assert before[hit].startswith(after[hit])
    if how == "flip":
        flipped = int.from_bytes(before[hit], "big") ^ int.from_bytes(after[hit], "big")
        assert flipped.bit_count() == 1


def test_damage_needs_a_complete_save(tmp_path):
    (tmp_path / "saves/00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="no complete save"):
        damage_newest_save(tmp_path, "any", 0)


def test_wiping_keeps_the_folder_and_follows_no_links(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        (folder / "run/segment").mkdir(parents=True)
        (folder / "run/segment/tables").write_bytes(b"rows")
    (mine / "link").symlink_to(other)
    assert wipe(mine) == [mine / "link", mine / "run"]
    assert list(mine.iterdir()) == []
    assert (other / "run/segment/tables").exists()
    assert wipe(tmp_path / "nothing there") == []


def test_wiping_tolerates_concurrent_removal(tmp_path, monkeypatch):
    (tmp_path / "rank0" / "tables").mkdir(parents=True)
    (tmp_path / "rank0" / "owner").touch()
    (tmp_path / "rank1").mkdir()
    unlink = os.unlink

    def second(path, **options):
        unlink(path, **options)
        unlink(path, **options)  # another process was faster

    monkeypatch.setattr(os, "unlink", second)
    assert wipe(tmp_path) == [tmp_path / "rank0", tmp_path / "rank1"]
    assert list(tmp_path.iterdir()) == []


def test_shared_folders_are_never_wiped(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for folder in (shared, link, Path("/"), Path("/proc")):
        with pytest.raises(ValueError, match="node's own"):
            check_wipeable(folder)
