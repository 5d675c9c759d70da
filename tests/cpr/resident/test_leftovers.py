"""`cpr clean` as a person meets it: what is there, what is in use, and what goes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpr.cli import entry
from cpr.processes import Process
from cpr.resident.folders import KEEPER_PREFIX
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


def test_leftovers_go_and_what_is_in_use_stays(root, capsys):
    live, dead, paused = (sealed(run, root) for run in ("live", "dead", "paused"))
    dead.release()
    paused.release()
    (paused.folder.parent / f"{KEEPER_PREFIX}{os.getpid()}-{Process.this().start_ticks}").touch(0o600)
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


def test_it_needs_no_torch(root):
    code = "import sys; from cpr.cli import entry; entry(['clean']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
