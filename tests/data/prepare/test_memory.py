"""The memory ceiling, with an input larger than it."""

import subprocess
import sys
import time

import psutil
import pytest

from data.prepare.config import BYTES_PER_BLOCK_BYTE
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
def test_memory_of_all_processes_stays_below_the_limit(tmp_path):
    raw = tmp_path / "day_0"
    usual = b"\n".join(make_lines(20_000)) + b"\n"
    with raw.open("wb") as stream:
        stream.write(SHORTEST * 2_000_000)  # most rows of a byte
        while stream.tell() <= CEILING_BYTES:
            stream.write(usual)
    command = [sys.executable, "-m", "data.prepare", str(raw), "--out", str(tmp_path / "out")]
    command += ["--processes", "1", "--memory", CEILING]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))
        time.sleep(0.05)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert 100 << 20 < peak_bytes < CEILING_BYTES
    for path in tmp_path.rglob("*"):  # pytest keeps the folders of past runs
        if path.is_file():
            path.unlink()


READ_BLOCK = """
import resource
import sys
from data.prepare.parse.columns import read_block

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

line = bytes.fromhex(sys.argv[1])
assert sum(len(bad) for _, bad in read_block(line * 1000)) == 1000
before = peak_kib()
num_bad = sum(len(bad) for _, bad in read_block(line * int(sys.argv[2])))
print(num_bad, peak_kib() - before)
"""


@pytest.mark.system
@pytest.mark.parametrize("line", [b"\n", b"x\n", b"\xff\r\n", b"many\tfields\tin\ta\tbad\tline\n"])
def test_a_block_of_nothing_but_bad_lines_takes_what_is_planned(line):
    num_lines = (1 << 20) // len(line)
    command = [sys.executable, "-c", READ_BLOCK, line.hex(), str(num_lines)]
    num_bad, taken_kib = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert num_bad == num_lines
    assert taken_kib << 10 <= BYTES_PER_BLOCK_BYTE * num_lines * len(line)
