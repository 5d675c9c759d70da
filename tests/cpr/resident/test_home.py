"""Who may pick up what: whole memory of dead owners, of this run and this user, and nothing else."""

import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from cpr.errors import NotEnoughMemoryError, ResidentMemoryError
from cpr.processes import Process
from cpr.resident import folders
from cpr.resident.folders import make_private, segment_folders, try_lock
from cpr.resident.home import Home, run_key
from cpr.resident.layout import LAYOUT_FILE
from cpr.resident.segment import Segment
from tests.cpr.resident.shards import RUN, assert_same, crash_and_find, make_shard


def sealed(home):
    segment = home.create("rank1")
    shard = make_shard(segment)
    segment.seal(**RUN, shards=[shard])
    return segment, shard


def test_the_next_worker_finds_what_a_dead_one_sealed(home):
    segment, shard = sealed(home)
    assert home.find() == ([], [f"{segment.name}: its owner is alive"])
    found = crash_and_find(home, segment)
    assert found.folder == segment.folder
    assert_same([shard], found.held_shards())


def _seal_and_fork(pipe, home):
    sealed(home)
    loader = os.fork()
    if loader == 0:
        signal.pause()
    pipe.send(loader)
    signal.pause()


@pytest.mark.system
def test_a_killed_worker_is_dead_at_once_even_if_its_forks_live(home, start):
    child, pipe = start(_seal_and_fork, home)
    loader = pipe.recv()
    try:
        assert home.find()[0] == []
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert Process.find(child.pid) is None
        assert Process.find(loader)
        (found,), _ = home.find()
        assert found.status.pid == child.pid
        assert found.claim()
    finally:
        os.kill(loader, signal.SIGKILL)


def _claim(pipe, folder):
    mine = Segment(folder)
    pipe.send("ready")
    pipe.recv()
    pipe.send(mine.claim())
    pipe.recv()


@pytest.mark.system
def test_of_several_that_claim_at_once_one_wins(home, start):
    segment, _ = sealed(home)
    segment.release()
    children = [start(_claim, segment.folder) for _ in range(4)]
    for _, pipe in children:
        assert pipe.recv() == "ready"
    for _, pipe in children:
        pipe.send("go")
    assert sorted(pipe.recv() for _, pipe in children) == [False, False, False, True]
    assert not segment.claim()


def _look_slowly(pipe, home):
    def slowly(file):
        locked = try_lock(file)
        pipe.send("looking")
        time.sleep(0.3)
        return locked

    folders.try_lock = slowly
    home.find()


@pytest.mark.system
def test_looking_around_does_not_disturb_those_who_claim(home, start):
    segment, _ = sealed(home)
    segment.release()
    _, pipe = start(_look_slowly, home)
    assert pipe.recv() == "looking"
    assert segment.claim()


def test_a_death_before_sealing_leaves_nothing_to_find_and_no_memory(home):
    segment = home.create("rank1")
    make_shard(segment)
    segment.release()
    found, (refused,) = home.find()
    assert found == []
    assert refused == f"{segment.name}: its owner died before it was complete; removed"
    assert segment_folders(home.folder) == []


WEIGHTS = "model.t-weights.memory"


def shift_a_shard(layout):
    layout.write_bytes(layout.read_bytes().replace(b'"row_offset": 40', b'"row_offset": 41'))


def replace_by_a_link(path):
    other = path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(other)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("marks", lambda path: path.write_bytes(b"x" * 4096), "marks begins with"),
        (LAYOUT_FILE, shift_a_shard, "differs from its checksum"),
        (LAYOUT_FILE, lambda path: os.truncate(path, 100), "layout.json is damaged"),
        (WEIGHTS, lambda path: os.truncate(path, 100), "has 100 bytes instead of 1280"),
        (WEIGHTS, Path.unlink, "No such file"),
        (WEIGHTS, replace_by_a_link, "is a symbolic link"),
        (WEIGHTS, lambda path: path.chmod(0o644), "is open to other users"),
    ],
)
def test_damaged_memory_is_refused_with_the_reason_and_freed(home, file, damage, reason):
    segment, _ = sealed(home)
    segment.release()
    damage(segment.folder / file)
    found, (refused,) = home.find()
    assert found == []
    assert reason in refused
    assert not segment.folder.exists()


def test_a_link_in_place_of_a_segment_is_left_alone(home, tmp_path):
    other = Home("other", tmp_path)
    segment, _ = sealed(other)
    segment.release()
    (home.folder / "rank0-0123").symlink_to(segment.folder)
    assert home.find() == ([], [])
    assert segment.folder.exists()


def test_memory_of_another_user_is_refused(home):
    if os.getuid():
        pytest.skip("only root can give files away")
    segment, _ = sealed(home)
    segment.release()
    os.chown(segment.folder, 12345, 12345)
    found, (refused,) = home.find()
    assert found == []
    assert refused.endswith(f"belongs to user 12345, not to user {os.getuid()}; left alone")
    assert segment.folder.exists()


@pytest.mark.parametrize("level", ["user", "run"])
@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_home_that_others_could_have_made_is_refused(tmp_path, level, trap):
    user = tmp_path / f"cpr-{os.getuid()}"
    place = user if level == "user" else user / "run"
    place.parent.mkdir(mode=0o700, exist_ok=True)
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    elif trap == "open":
        place.mkdir()
        place.chmod(0o755)
    else:
        place.touch()
    with pytest.raises(ResidentMemoryError, match="nothing of it was used"):
        Home("run", tmp_path)


def test_others_cannot_look_inside(home):
    previous = os.umask(0)
    try:
        segment, _ = sealed(home)
        segment.replica.write(1, {"a": torch.ones(3)})
    finally:
        os.umask(previous)
    for path in [home.folder.parent, *home.folder.parent.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_another_run_finds_nothing(home, tmp_path):
    segment, _ = sealed(home)
    segment.release()
    assert Home("another", tmp_path).find() == ([], [])


def test_a_home_is_removed_by_the_last_to_leave(home, tmp_path):
    first, second = home.create("rank0"), home.create("rank1")
    first.remove()
    assert not home.remove()
    second.remove()
    assert home.remove()
    assert home.remove()
    assert list(tmp_path.iterdir()) == []
    home.create("rank0").remove()  # and made again when it is needed


def test_only_an_owner_removes_a_segment(home):
    segment, _ = sealed(home)
    with pytest.raises(ResidentMemoryError, match=f"process {os.getpid()} owns it"):
        Segment(segment.folder).remove()
    assert segment.folder.exists()


def test_too_little_memory_is_said_before_it_is_too_late(small_root):
    segment = Home("run", small_root).create("rank0")
    with pytest.raises(NotEnoughMemoryError, match=r"40 MB of shared memory are needed.*--shm-size.*CPR_RES"):
        segment.region("table", torch.float32, 10_000_000)
    # all of it can be touched: what was given is there
    segment.region("table", torch.float32, 200_000).fill_(1)


def test_the_key_of_a_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "CPR_LAUNCH", "CPR_AGENT_PID"):
        monkeypatch.delenv(name, raising=False)
    alone = run_key("ckpt")
    assert run_key(str(tmp_path / "ckpt")) == run_key(f"file://{tmp_path}/ckpt") == alone
    assert run_key("other") != alone
    monkeypatch.setenv("CPR_LAUNCH", "launch")
    launched = run_key("ckpt")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_key("ckpt") == launched
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "drawn by a torchrun --standalone that replaces another")
    assert run_key("ckpt") == launched
    monkeypatch.delenv("CPR_LAUNCH")
    assert len({alone, launched, run_key("ckpt")}) == 3


def test_another_run_may_end_while_this_one_begins(tmp_path, monkeypatch):
    """Its end takes the user's folder away, if nothing else is in it at that moment."""
    other = Home("other", tmp_path)

    def let_the_other_end(path):
        if path.name == "run":
            other.remove()
        make_private(path)

    monkeypatch.setattr("cpr.resident.home.make_private", let_the_other_end)
    home = Home("run", tmp_path)
    assert not other.folder.exists()
    assert home.create("rank0").folder.is_dir()
