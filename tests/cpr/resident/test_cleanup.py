"""`cpr clean` as a user sees it: what is there, what is in use, and what goes."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from cpr.cli.main import entry
from cpr.processes import Process, pid_namespace
from cpr.resident.cleanup import free_leftovers
from cpr.resident.folders import JANITOR_PREFIX, KEEPER_PREFIX, open_private, try_lock
from cpr.resident.home import Home
from tests.cpr.resident.shards import RUN, make_shard


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(tmp_path))
    return tmp_path


def sealed(run, root):
    segment = Home(run, root).create("rank0")
    segment.seal(**RUN, shards=[make_shard(segment)])
    return segment


def keep(segment, tag):
    """Have its run's memory kept for a process."""
    (segment.folder.parent / f"{KEEPER_PREFIX}{tag}").touch(0o600)


def abandoned(run, root, tag=None):
    """Memory of a run whose workers and janitor are dead, kept for a process."""
    segment = sealed(run, root)
    segment.release()
    if tag is not None:
        keep(segment, tag)
    return segment


def tag_in_container(pid=7):
    return f"{pid_namespace() + 1}-{pid}-1234"


def test_leftovers_go_and_what_is_in_use_stays(root, capsys):
    live, dead, paused = (sealed(run, root) for run in ("live", "dead", "paused"))
    dead.release()
    paused.release()
    keep(paused, Process.this().tag)
    assert entry(["clean"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0].rpartition("/")[2] for line in out[:3]] == ["dead", "live", "paused"]
    assert out[0].endswith("in 1 segment, left over")
    assert out[1].endswith("in use by 1 live worker")
    assert out[2].endswith(f"in use by process {os.getpid()}, which may restart its workers")
    assert out[3] == "to remove what is left over: cpr clean --yes"
    assert dead.folder.exists()

    assert entry(["clean", "--yes"]) == 0
    assert "dead: " in (said := capsys.readouterr().out)
    assert "removed" in said
    assert not dead.folder.exists()
    assert live.folder.exists()
    assert paused.folder.exists()


def test_what_ends_while_it_is_looked_at_hides_nothing(root, capsys, monkeypatch):
    """Workers that live make and remove files all the time, and whole runs end."""
    live, gone, dead = sealed("a-live", root), sealed("b-gone", root), sealed("c-dead", root)
    gone.release()
    dead.release()
    (live.folder / "passing").touch()
    look = Path.lstat

    def lstat(path):
        if path.name == "passing":
            path.unlink(missing_ok=True)
        elif path.name == "b-gone":
            shutil.rmtree(path, ignore_errors=True)
        return look(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert entry(["clean", "--yes"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0].rpartition("/")[2] for line in out[:-1]] == ["a-live", "c-dead"]
    assert live.folder.exists()
    assert not dead.folder.exists()


def test_nothing_is_there(root, capsys):
    assert entry(["clean"]) == 0
    assert capsys.readouterr().out == f"no run of this user has shared memory in {root}\n"


def test_strangers_are_not_touched(root, capsys):
    segment = sealed("run", root)
    segment.release()
    user = segment.folder.parents[1]
    (root / "somebodys").mkdir()
    (user / "link").symlink_to(root / "somebodys")
    assert entry(["clean", "--yes"]) == 0
    assert not segment.folder.exists()
    assert (root / "somebodys").exists()
    assert (user / "link").is_symlink()
    user.chmod(0o777)
    assert entry(["clean", "--yes"]) == 2
    assert "is open to other users" in capsys.readouterr().err


def test_the_start_of_a_run_frees_what_runs_without_a_janitor_left(root):
    live, over, unkept = (
        sealed("live", root),
        abandoned("over", root, f"{pid_namespace()}-{2**22}-1"),
        abandoned("unkept", root),
    )
    kept = abandoned("kept", root, Process.this().tag)
    freed = dict(free_leftovers(root))
    assert freed.keys() == {over.folder.parent, unkept.folder.parent}
    assert min(freed.values()) > 1000
    assert not over.folder.parent.exists()
    assert live.folder.exists()
    assert kept.folder.exists()


def test_what_cannot_be_removed_does_not_stop_a_run(root, caplog, monkeypatch):
    segment = abandoned("over", root)
    monkeypatch.setattr(shutil, "rmtree", passing_error)
    assert list(free_leftovers(root)) == []
    assert "cannot be freed: [Errno 5]" in caplog.text
    assert segment.folder.exists()


def passing_error(*_args):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_memory_of_another_container_is_freed_on_request_only(root, capsys):
    """Its agent cannot be seen from here: neither that it lives, nor that it is dead."""
    segment = abandoned("run", root, tag_in_container(pid=7))
    assert list(free_leftovers(root)) == []
    assert entry(["clean"]) == 0
    said = "left over unless process 7 of another PID namespace (container) still runs\n"
    assert said in capsys.readouterr().out
    assert entry(["clean", "--yes"]) == 0
    assert not segment.folder.exists()


def test_memory_that_a_janitor_of_another_container_watches_stays(root, capsys):
    segment = abandoned("run", root, tag_in_container())
    janitor = segment.folder.parent / f"{JANITOR_PREFIX}{pid_namespace() + 1}"
    file = open_private(janitor, os.O_RDWR | os.O_CREAT)
    assert try_lock(file)
    try:
        assert entry(["clean", "--yes"]) == 0
        assert "in use by a run in another PID namespace (container)" in capsys.readouterr().out
        assert segment.folder.exists()
    finally:
        os.close(file)
