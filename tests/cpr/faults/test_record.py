"""Records of injections, over restarts and in several processes."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from cpr.faults.injection_record import InjectionRecord

REPO = Path(__file__).parents[3]


def test_start_is_recorded_once(tmp_path):
    first = InjectionRecord(tmp_path / "deep/er/record.jsonl").begin(5)
    assert first.step == 5
    assert InjectionRecord(tmp_path / "deep/er/record.jsonl").begin(9) == first


def test_event_is_claimed_once(tmp_path):
    path = tmp_path / "record.jsonl"
    assert InjectionRecord(path).claim("0.3", step=4, rank=1)
    assert not InjectionRecord(path).claim("0.3", step=9, rank=1)
    assert InjectionRecord(path).claim("0.33")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["0.3", "0.33"]
    assert (lines[0]["step"], lines[0]["rank"]) == (4, 1)


@pytest.mark.parametrize("num_bytes", range(1, 60, 7))
def test_incomplete_line_is_ignored(tmp_path, num_bytes):
    path = tmp_path / "record.jsonl"
    InjectionRecord(path).claim("0.0")
    InjectionRecord(path).claim("0.1")
    path.write_bytes(path.read_bytes()[:-num_bytes])
    record = InjectionRecord(path)
    assert not record.claim("0.0")
    assert record.claim("0.1") == (num_bytes > 1)  # a line that lacks only its newline is complete
    assert record.claim("0.2")
    assert not any(record.claim(name) for name in ("0.0", "0.1", "0.2"))


@pytest.mark.system
@pytest.mark.timeout(60)
def test_one_of_many_processes_claims_each_event(tmp_path):
    path = tmp_path / "record.jsonl"
    code = (
        "import sys; from pathlib import Path; from cpr.faults.injection_record import InjectionRecord\n"
        "record = InjectionRecord(Path(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "record.begin(0)\n"
        "print(sum(record.claim(str(number)) for number in range(50)))\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, path], stdin=PIPE, stdout=PIPE, text=True, cwd=REPO)
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # all at once
        worker.stdin.write("go\n")
        worker.stdin.flush()
    claimed = [int(worker.communicate(timeout=50)[0]) for worker in workers]
    assert sum(claimed) == 50
    assert sum("begun" in line for line in path.read_text().splitlines()) == 1
