"""Records of injections, over restarts and in several processes."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from cpr.faults.injection_record import InjectionRecord

REPO = Path(__file__).parents[3]


def test_start_and_events_are_recorded_once(tmp_path):
    path = tmp_path / "deep/er/record.jsonl"
    first = InjectionRecord(path).begin(5)
    assert first[1] == 5
    assert InjectionRecord(path).begin(9) == first
    is_first, began = InjectionRecord(path).claim("0.3", step=4, rank=1)
    assert is_first
    assert InjectionRecord(path).claim("0.3", step=9, rank=1) == (False, began)
    assert InjectionRecord(path).claim("0.33")[0]
    events = InjectionRecord(path).events()
    assert [(event["event"], event.get("step"), event.get("rank")) for event in events] == [
        ("0.3", 4, 1),
        ("0.33", None, None),
    ]


@pytest.mark.parametrize("num_bytes", range(1, 60, 7))
def test_incomplete_line_is_ignored(tmp_path, num_bytes):
    path = tmp_path / "record.jsonl"
    InjectionRecord(path).claim("0.0")
    InjectionRecord(path).claim("0.1")
    path.write_bytes(path.read_bytes()[:-num_bytes])
    record = InjectionRecord(path)
    assert not record.claim("0.0")[0]
    assert record.claim("0.1")[0] == (num_bytes > 1)  # a line that lacks only its newline is complete
    assert record.claim("0.2")[0]
    assert not any(record.claim(name)[0] for name in ("0.0", "0.1", "0.2"))


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
        "print(sum(record.claim(str(number))[0] for number in range(50)))\n"
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
