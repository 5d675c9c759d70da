"""A Dask cluster makes the bytes of one machine, whoever is killed; and what it lacks is said in one line."""

import hashlib
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from data.jobs.cluster import DaskCluster, _refuse_little_memory, connected
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.jobs.needs import Needs, refuse_once, versions
from tests.data.prepare.conftest import make_lines

NUM_LINES = 24_000
FLAGS = ("--ids", "vocabulary", "--days", "4")


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    lines = make_lines(2000) * (NUM_LINES // 2000)
    lines[100] = b"bad"
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"\n".join(lines))
    return path


def start(raw, out, *flags):
    command = [sys.executable, "-m", "data.prepare", str(raw), "--out", str(out), *FLAGS, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process):
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def digests(folder):
    return {name: hashlib.sha256((folder / name).read()).hexdigest() for name in folder.sizes()}


@pytest.fixture(scope="module")
def expected(raw, tmp_path_factory):
    """What one machine makes."""
    out = tmp_path_factory.mktemp("local") / "out"
    end(start(raw, out, "--processes", "2"))
    return digests(Location.of(out))


def wait_for_pieces(process, out, num_pieces, folder):
    while process.poll() is None and len(list((out / ".prepare" / folder).glob("*.json"))) < num_pieces:
        time.sleep(0.005)


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_killed_worker_changes_no_byte(raw, expected, dask_cluster, tmp_path):
    process = start(raw, tmp_path / "out", "--cluster", dask_cluster.address)
    wait_for_pieces(process, tmp_path / "out", 2, "counts")
    dask_cluster.workers()[0].kill()
    assert f"prepare: {NUM_LINES:,} rows in" in end(process)
    assert digests(Location.of(tmp_path / "out")) == expected


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_killed_driver_continues_on_the_cluster_or_on_one_machine(raw, expected, dask_cluster, tmp_path):
    process = start(raw, tmp_path / "out", "--cluster", dask_cluster.address)
    wait_for_pieces(process, tmp_path / "out", 2, "pieces")
    process.kill()
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("vocabulary/*")}
    end(start(raw, tmp_path / "out", "--processes", "1"))
    assert len(kept) == 26
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert digests(Location.of(tmp_path / "out")) == expected


@pytest.mark.system
@pytest.mark.timeout(120)
def test_between_two_stores_it_makes_the_same_bytes_and_resumes(raw, expected, dask_cluster, s3):
    source = Location.of(s3.uri("bucket/raw/train.txt"))
    with durable_file(source) as sink:
        sink.write(raw.read_bytes())
    out = Location.of(s3.uri("bucket/out"))
    process = start(source.root, out.root, "--cluster", dask_cluster.address)
    while process.poll() is None and len((out / ".prepare/counts").names()) < 40:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    output = end(start(source.root, out.root, "--cluster", dask_cluster.address))
    assert f"s3://bucket/out: {NUM_LINES - 1:,} rows" in output
    assert "secret" not in output
    assert f"count: {NUM_LINES:,} rows" not in output, "nothing was resumed"
    assert digests(out) == expected


def test_more_memory_than_a_worker_has_is_refused():
    workers = [{"memory_limit": 4 << 30}, {"memory_limit": 2 << 30}, {"memory_limit": 0}]
    _refuse_little_memory(workers, 1600 << 20)
    with pytest.raises(ValueError, match=r"1700M is more than 80% of the 2048 MiB .* give --memory 1638M"):
        _refuse_little_memory(workers, 1700 << 20)


SCHEMA = """
[label]
column = "rating"
at_least = 3
[time]
column = "time"
unit = "s"
[[dense]]
column = "price"
standardize = true
[[sparse]]
column = "user"
"""


@pytest.mark.system
@pytest.mark.timeout(120)
def test_convert_between_two_stores_with_a_killed_worker(dask_cluster, s3, tmp_path):
    rng = np.random.default_rng(0)
    schema, files, sources = tmp_path / "schema.toml", [], []
    schema.write_text(SCHEMA)
    for number in range(4):
        numbers = rng.integers(0, 5, 20_000), rng.integers(0, 10**6, 20_000), rng.integers(0, 999, 20_000)
        columns = dict(zip(("rating", "time", "user"), numbers, strict=True))
        table = pl.DataFrame(columns | {"price": rng.standard_normal(20_000)})
        table.write_csv(tmp_path / f"{number}.csv")
        files.append(tmp_path / f"{number}.csv")
        sources.append(Location.of(s3.uri(f"bucket/csv/{number}.csv")))
        with durable_file(sources[-1]) as sink:
            sink.write(files[-1].read_bytes())
    out = Location.of(s3.uri("bucket/converted"))

    def convert(files, out, *flags):
        command = [
            sys.executable,
            "-m",
            "data.convert",
            str(schema),
            *map(str, files),
            "--out",
            str(out),
            *flags,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    end(convert(files, tmp_path / "out", "--processes", "1"))
    process = convert([each.root for each in sources], out.root, "--cluster", dask_cluster.address)
    while process.poll() is None and not (out / ".convert/runs").names():
        time.sleep(0.02)
    dask_cluster.workers()[0].kill()
    assert "80,000 rows in" in end(process)
    assert digests(out) == digests(Location.of(tmp_path / "out"))


@pytest.mark.parametrize("address", ["nonsense", "s3://bucket", "tcp://host", "http://host:8786"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=r"address of a Dask scheduler such as tcp://HOST:8786, not"):
        connected(address, 0).__enter__()


def test_without_dask_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r'pip install "\.\[cluster\]"'):
        connected("tcp://host:8786", 0).__enter__()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "tls://[::1]:9", "tcp://127.0.0.1:99999"])
def test_a_scheduler_that_does_not_answer_is_named(address):
    with pytest.raises(ValueError, match=f"no Dask scheduler answers at {re.escape(address)}"):
        connected(address, 0).__enter__()


@pytest.fixture
def needs(tmp_path):
    for name, content in {"raw": b"1234", "token": b"secret"}.items():
        (tmp_path / name).write_bytes(content)
    raw, token = Location.of(tmp_path / "raw"), Location.of(tmp_path / "token")
    return Needs(versions(), ((raw, 4),), (token, b"secret"))


def test_a_machine_that_has_all_is_fit(needs):
    assert needs.problem() is None
    refuse_once(needs)


def test_what_a_machine_lacks_is_named(needs, tmp_path):
    def other(name):
        return tuple((key, "0.0" if key == name else value) for key, value in needs.versions)

    assert "has polars" in replace(needs, versions=other("polars")).problem()
    assert "has the package `data`" in replace(needs, versions=other(versions()[1][0])).problem()
    (tmp_path / "raw").write_bytes(b"another one")
    assert "cannot read" in needs.problem()
    (tmp_path / "raw").write_bytes(b"1234")
    (tmp_path / "token").unlink()
    assert f"does not share the folder {tmp_path}" in needs.problem()
    with pytest.raises(ValueError, match="a worker of the cluster does not share"):
        refuse_once(replace(needs, files=()))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            ModuleNotFoundError("No module named 'data'"),
            "lacks this package (No module named 'data')",
        ),
        ("has polars 1.0, not 2.0", "the Dask worker tcp://b has polars 1.0"),
    ],
)
def test_the_worker_that_is_unfit_is_named(answer, words, needs):
    class Client:
        def run(self, function, on_error):
            return {"tcp://a": None, "tcp://b": answer}

    with pytest.raises(ValueError, match=r"tcp://b") as error:
        DaskCluster(Client(), "tcp://scheduler", 1)._refuse_unfit(needs)
    assert words in str(error.value)
