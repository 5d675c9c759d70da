"""Checks of one node, with fakes for what this machine has not."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpr.doctor import node
from cpr.doctor.finding import Finding
from cpr.doctor.node import (
    check_gpus,
    check_locked_memory,
    check_open_files,
    check_shared_memory,
    check_versions,
    memory_limit_bytes,
    node_findings,
)
from cpr.resident.cleanup import Occupied

SHM = Path("/dev/shm")
RAM = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("needed", "limit", "available", "left_over", "state", "advice"),
    [
        (1, 10**15, 10**15, (0, 0), "ok", "compared with 1 B, and 10% for processes"),
        (None, 10**15, 10**15, (0, 0), "ok", "--memory does not say"),
        (10**15, 10**16, 10**16, (0, 0), "PROBLEM", "enlarge /dev/shm to 1,000 TB"),
        (10**15, 10**16, 10**16, (0, 1), "PROBLEM", "`cpr clean` lists what dead runs hold"),
        (10**15, 10**16, 10**15, (10**15, 0), "ok", "available 2,000 TB"),
        (10**15, 10**14, 10**16, (0, 0), "PROBLEM", "or take more nodes; enlarge"),
        (2000, 1000, 10**15, (0, 0), "PROBLEM", "raise the memory limit of the job to 2.2 kB"),
        (2000, 10**15, 1000, (0, 0), "PROBLEM", "end what else takes memory on this machine"),
        (2000, 2100, 10**15, (0, 0), "warning", "give it 2.2 kB or more"),
        (2000, 10**15, 2100, (0, 0), "warning", "give it 2.2 kB or more"),
        (1, 1000, 1000, (0, 5), "warning", "`cpr clean`"),
    ],
)
def test_shared_memory_has_room(needed, limit, available, left_over, state, advice):
    found = check_shared_memory(SHM, needed, limit, available, left_over)
    assert found.state == state
    assert advice in found.text


def test_huge_pages_are_not_among_the_available_memory(monkeypatch):
    monkeypatch.setattr(node, "mount_of", lambda folder: (str(folder), "hugetlbfs"))
    assert check_shared_memory(SHM, 1, RAM, 0, (0, 0)).state == "ok"


def test_a_disk_is_no_shared_memory():
    found = check_shared_memory(Path(__file__).parent, 1, RAM, RAM, (0, 0))
    assert found.state == "PROBLEM"
    assert "CPR_RESIDENT_ROOT" in found.text


def test_a_root_that_cannot_be_used_is_told_and_the_other_checks_go_on(monkeypatch):
    monkeypatch.setenv("CPR_RESIDENT_ROOT", "/nonexistent")
    found = {each.check: each for each in node_findings(1, None)}
    text = "/nonexistent (CPR_RESIDENT_ROOT) cannot be used: No such file or directory. What to do: mend"
    assert text in str(found["shared memory"])
    assert found["shared memory"].state == "PROBLEM"
    assert "GPUs" in found


def test_available_memory_is_read_in_bytes(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    7 kB\n")
    assert node.available_bytes(tmp_path / "meminfo") == 7 * 1024
    assert 0 < node.available_bytes() < RAM


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "700", "job/step/memory.max": "max"}, 700),
        ("0::/job\n", {"memory.max": "500", "job/memory.max": "700"}, 500),
        ("4:memory:/a\n1:cpu:/b\n", {"memory/a/memory.limit_in_bytes": "9", "b/memory.max": "1"}, 9),
        ("4:memory:/not/here\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, RAM),
        ("", {}, RAM),
    ],
)
def test_the_least_limit_of_all_control_groups_counts(tmp_path, groups, files, limit):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert memory_limit_bytes(tmp_path / "groups", tmp_path / "root") == limit


def test_what_others_hold_comes_on_top(monkeypatch):
    full = SimpleNamespace(f_frsize=1, f_blocks=2 * 10**9, f_bavail=0)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    assert "enlarge /dev/shm to 5 GB or more" in check_shared_memory(SHM, 3 * 10**9, RAM, RAM, (0, 0)).text


def test_shared_memory_must_be_writable(monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    found = check_shared_memory(SHM, 1, RAM, RAM, (0, 0))
    assert "cannot be written. What to do: mount it writable" in found.text


def test_memory_that_the_next_start_frees_is_not_held_against_the_node(monkeypatch):
    run = Occupied(folder=SHM, num_bytes=1, num_segments=1, in_use_by="", doubt="", is_unsaved=False)
    changes = {"num_bytes": 10}, {"in_use_by": "a worker"}, {"doubt": "unless"}, {"is_unsaved": True}
    monkeypatch.setattr(node, "occupied", lambda: [replace(run, **change) for change in changes])
    assert node.left_behind() == (10, 2)


def test_versions_are_told_where_torch_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(node, "VERSIONS", (sys.executable, "-c", "raise SystemExit('no libtorch.so')"))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "no libtorch.so. What to do: as it says" in str(next(node_findings(None, None)))


def test_limits_and_gpus():
    assert [check_open_files(each).state for each in (1024, 65536, -1)] == ["warning", "ok", "ok"]
    locked = [check_locked_memory(*each).state for each in ((8192, True), (8192, False), (-1, True))]
    assert locked == ["PROBLEM", "ok", "ok"]
    assert check_gpus([], has_driver=True).state == "PROBLEM"
    assert check_gpus(["H100", "H100"], has_driver=True) == Finding("GPUs", "2 H100")
    assert check_gpus([], has_driver=False).state == "ok"


def test_versions_that_do_not_fit_are_told():
    assert check_versions([sys.executable, "-c", "print('fit')"]).text.endswith("fit")
    found = check_versions([sys.executable, "-c", "raise SystemExit('torch 1 with torchrec 2')"])
    assert found.state == "PROBLEM"
    assert "torch 1 with torchrec 2. What to do: " in found.text
    assert "ended with code -9" in check_versions(["sh", "-c", "kill -9 $$"]).text
