"""Real processes: killed at any moment, a full disk, and the memory limit."""

import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data.convert.config import ConvertConfig
from data.convert.job import convert
from data.dataset import read_manifest
from data.jobs.location import Location
from data.jobs.verify import verify
from data.schema import Schema
from tests.data.convert.conftest import digests

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

SCHEMA = """
[label]
column = "y"
[[dense]]
column = "x"
standardize = true
[[sparse]]
column = "user"
[[sparse]]
column = "tags"
separator = "|"
[time]
column = "t"
unit = "s"
[split]
parts = 20
"""
LEAST_MEMORY = ["--processes", "1", "--memory", "492M"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """A schema and two files of 60,000 rows, in no order of time, one row bad."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "schema.toml").write_text(SCHEMA)
    rng = random.Random(0)
    for name in ("a.csv", "b.csv"):
        lines = [
            f"{rng.randint(0, 1)},{rng.random()},user {rng.randint(0, 3000)},"
            f"{'|'.join(rng.choices(['one', 'two', 'three'], k=rng.randint(0, 3)))},{rng.randint(0, 10**6)}"
            for _ in range(60_000)
        ]
        lines[100 if name == "a.csv" else 50_000] = "bad"
        (folder / name).write_text("y,x,user,tags,t\n" + "\n".join(lines))
    return [str(folder / name) for name in ("schema.toml", "a.csv", "b.csv")]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """The data set of an undisturbed job, with more memory than the others."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(
        ConvertConfig(
            schema=Schema.from_toml(Path(inputs[0])),
            files=tuple(map(Location.of, inputs[1:])),
            out=Location.of(out),
            num_processes=2,
        )
    )
    return out


def start(inputs, out, *flags):
    command = [sys.executable, "-m", "data.convert", *inputs, "--out", str(out), *(flags or LEAST_MEMORY)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_undisturbed_data_set_is_whole(whole):
    manifest = read_manifest(str(whole))
    assert manifest.num_rows == 119_998
    assert manifest.days == tuple(range(20))
    assert verify(Location.of(whole)) == []
    assert sorted(path.name for path in whole.iterdir() if path.is_file()) == [
        "dataset.json",
        "rejects.jsonl",
    ]


def test_killed_and_started_again_ends_with_the_same_bytes(inputs, whole, tmp_path):
    out = tmp_path / "out"
    for folder, num_records in (("runs", 1), ("runs", 4), ("parts", 1)):
        process = start(inputs, out)
        records = out / ".convert" / folder
        while process.poll() is None and len(list(records.glob("*.json"))) < num_records:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert not (out / "dataset.json").exists(), "the job ended before it was killed"
    kept = {path: path.stat().st_mtime_ns for path in out.glob("day=*/*.parquet")}
    num_finished = len(list(records.glob("*.json")))  # a file whose job was killed before its record is not
    process = start(inputs, out, "--processes", "2")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "119,998 rows on 20 days in 20 files; 2 bad rows" in output
    assert kept
    unchanged = [path for path, made_ns in kept.items() if path.stat().st_mtime_ns == made_ns]
    assert len(unchanged) >= num_finished, "a finished file was made again"
    assert digests(out) == digests(whole)


def test_a_killed_worker_and_a_full_disk_stop_the_job_and_the_next_one_continues(inputs, whole, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        process = start(inputs, small / "out")
        output = process.communicate()[0]
        assert process.returncode == 2, output
        assert "the disk is full" in output
        assert not list((small / "out").rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
        process = start(inputs, small / "out")
        while not (
            workers := [one for one in psutil.Process(process.pid).children() if one.num_threads() > 1]
        ):
            time.sleep(0.01)
        workers[0].kill()
        output = process.communicate()[0]
        assert process.returncode == 1, output
        assert "same command again" in output
        process = start(inputs, small / "out")
        assert process.wait() == 0
        process.communicate()
        assert digests(small / "out") == digests(whole)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_memory_of_all_processes_stays_below_the_limit(tmp_path):
    """Short rows make most rows of a byte; half of them need Python's parser."""
    (tmp_path / "schema.toml").write_text('[label]\ncolumn = "y"\n[[sparse]]\ncolumn = "s"\nmin_count = 1\n')
    path, limit = tmp_path / "t.csv", 512
    with path.open("w") as stream:
        stream.write("y,s\n")
        stream.write('1,"2"\n' * 100_000)
        for first in range(20):
            stream.write("".join(f"0,{first % 3}{at}\n" for at in range(100_000)))
    process = start([str(tmp_path / "schema.toml"), str(path)], tmp_path / "out", "--memory", f"{limit}M")
    peak_bytes = 0
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            peak_bytes = max(peak_bytes, sum(one.memory_full_info().pss for one in family))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.02)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert 100 << 20 < peak_bytes < limit << 20
    path.unlink()
