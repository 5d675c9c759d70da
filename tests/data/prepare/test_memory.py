"""The memory ceiling, with an input larger than it."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.data.prepare.conftest import make_lines

CEILING = "500M"
CEILING_BYTES = 500 << 20
SHORTEST = b"0" + b"\t" * 39 + b"\n"


def tree_memory_bytes(pid: int) -> int:
    """Proportional set size of a process and its children."""
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children()]:
            total += process.memory_full_info().pss
    except psutil.NoSuchProcess:
        pass
    return total


@pytest.mark.system
@pytest.mark.timeout(240)
def test_all_processes_together_stay_under_the_ceiling(tmp_path):
    raw = tmp_path / "day_0"
    usual = b"\n".join(make_lines(20_000)) + b"\n"
    with raw.open("wb") as stream:
        for _ in range(2):
            stream.write(SHORTEST * 2_000_000)  # most rows of a byte
        while stream.tell() <= CEILING_BYTES:
            stream.write(usual)
    command = [sys.executable, "-m", "data.prepare", str(raw), "--out", str(tmp_path / "out")]
    command += ["--processes", "1", "--memory", CEILING]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))
        time.sleep(0.02)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert 100 << 20 < peak_bytes < CEILING_BYTES
    for path in tmp_path.rglob("*"):  # pytest keeps the folders of past runs
        if path.is_file():
            path.unlink()
