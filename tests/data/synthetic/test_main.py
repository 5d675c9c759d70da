import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from data.dataset import read_manifest
from data.synthetic import SyntheticConfig, generate
from data.synthetic.__main__ import main, parse

SMALL = ("--days", "2", "--rows-per-day", "1000", "--scale", "0.0001")


def test_flags_make_the_configuration():
    flags = "--out x --preset terabyte --scale 0.5 --days 3 --rows-per-day 7 --seed 9 --drift 0.25"
    config, out, processes = parse([*flags.split(), "--format=tsv", "--compression=gz", "--processes=4"])
    assert (out, processes) == ("x", 4)
    assert config == SyntheticConfig(
        preset="terabyte",
        scale=0.5,
        days=3,
        rows_per_day=7,
        seed=9,
        drift=0.25,
        format="tsv",
        compression="gz",
    )
    assert parse(["--out", "x"])[0] == SyntheticConfig()
    assert parse(["--out", "x", "--multi-hot"])[0] == SyntheticConfig(multi_hot=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scale", "2"], "scale is 2.0; choose a factor"),
        (["--processes", "0"], "choose at least 1"),
        (["--format", "tsv", "--multi-hot"], "use Parquet"),
    ],
)
def test_bad_flags_say_what_to_change(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(["--out", "x", *flags])
    assert message in capsys.readouterr().err


def test_best_auc_is_printed_and_nothing_else_off_a_terminal(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "set"), "--processes", "1", *SMALL]
    assert main(arguments) == 0
    first = capsys.readouterr()
    best = read_manifest(str(tmp_path / "set")).provenance["best_auc"]
    assert f"all: best reachable AUC {best:.4f}" in first.out
    assert first.out.startswith("made ")
    assert first.err == ""
    assert main(arguments) == 0
    again = capsys.readouterr()
    assert "already there, complete" in again.out
    assert again.out.splitlines()[1:] == first.out.splitlines()[1:]


def test_refusal_is_one_line_and_a_failed_exit(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path), *SMALL]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--rows-per-day", "99999999999999999999"], "6 days of 99,999,999,999,999,999,999 rows"),
        (["--days", "99999999999999999999", "--rows-per-day", "1"], "days of 1 rows"),
        (["--rows-per-day", "9" * 15, "--format", "tsv"], "GB at least"),
    ],
)
def test_what_cannot_fit_on_the_disk_is_refused_at_once(tmp_path, capsys, flags, what):
    assert main(["--out", str(tmp_path / "set"), *flags]) == 1
    error = capsys.readouterr().err
    assert what in error
    assert "GB free: lower --days or --rows-per-day, or name another --out" in error
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("out", ["/proc/none", "{}/file/set", "{}/" + "a" * 300])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys, out):
    (tmp_path / "file").touch()
    assert main(["--out", out.format(tmp_path), *SMALL]) == 1
    error = capsys.readouterr().err
    assert "cannot be made or read (" in error
    assert "choose another --out" in error
    assert error.count("\n") == 1


LONG = SyntheticConfig(days=8, rows_per_day=65_536, scale=1e-4)
LONG_FLAGS = ("--days", "8", "--rows-per-day", "65536", "--scale", "0.0001", "--processes", "2")


@pytest.fixture
def running(tmp_path):
    """A run in two processes that has finished a file and has a long way to go; and its workers."""
    command = [sys.executable, "-m", "data.synthetic", "--out", str(tmp_path / "set"), *LONG_FLAGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not list((tmp_path / "set").glob("day=*/*.parquet")):
                assert process.poll() is None
                time.sleep(0.02)
            workers = [child for child in psutil.Process(process.pid).children() if is_worker(child)]
            assert len(workers) == 2
            yield process, workers, tmp_path / "set"
        finally:
            process.kill()


def is_worker(process):
    return "data.jobs.worker" in process.cmdline()


@pytest.mark.system
@pytest.mark.timeout(60)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_run_ends_at_once_with_its_workers(running, signum):
    process, workers, path = running
    os.kill(process.pid, signum)
    _, error = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "Traceback" not in error
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert not (path / "dataset.json").exists()


@pytest.mark.system
@pytest.mark.timeout(60)
def test_killed_run_continues_to_the_same_bytes(running, tmp_path):
    process, workers, path = running
    process.kill()
    psutil.wait_procs(workers, timeout=20)
    kept = {file: file.stat().st_mtime_ns for file in path.glob("day=*/*.parquet")}
    assert 0 < len(kept) < LONG.days
    generate(LONG, path, processes=2)
    generate(LONG, tmp_path / "fresh", processes=2)
    assert read_manifest(str(path)) == read_manifest(str(tmp_path / "fresh"))
    made_again = [file for file, time_ns in kept.items() if file.stat().st_mtime_ns != time_ns]
    assert len(made_again) <= len(workers), "only what a worker had no time to note down"
    names = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert names == {".parquet", ".json"}
