"""Whole jobs: the same bytes whatever happens, and clear errors."""

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import zstandard

from data.criteo import COLUMN_NAMES
from data.dataset import read_manifest
from data.jobs.folder import locked
from data.jobs.location import Location
from data.jobs.verify import verify
from data.prepare.config import ONE_PASS, PrepareConfig
from data.prepare.job import prepare
from tests.data.prepare.conftest import make_lines

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]
DAYS = 12


def job(raw, out, ids="modulo", **changes):
    raw = raw if isinstance(raw, list) else [raw]
    table_rows = "1000" if ids in ONE_PASS else None
    return prepare(
        PrepareConfig(
            **{
                "raw": tuple(map(Location.of, raw)),
                "out": Location.of(out),
                "ids": ids,
                "table_rows": table_rows,
                "num_processes": 1,
                **changes,
            }
        )
    )


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """48,000 lines with two bad ones."""
    lines = make_lines(2000) * 24
    lines[100] = b"bad"
    lines[40_000] = lines[40_000].replace(b"\t", b"\t+", 1)
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.fixture(scope="module")
def whole(raw, tmp_path_factory) -> Path:
    """The data set of an undisturbed job."""
    out = tmp_path_factory.mktemp("whole") / "out"
    job(raw, out, num_days=DAYS)
    return out


def test_the_data_set_is_what_the_loader_reads(whole):
    manifest = read_manifest(str(whole))
    assert manifest.days == tuple(range(DAYS))
    assert manifest.num_rows == 47_998
    assert {feature.rows for feature in manifest.features} == {1000}
    tables = [pq.read_table(whole / part.path) for part in manifest.parts]
    assert tables[0].column_names == list(COLUMN_NAMES)
    assert {str(tables[0].schema.field(f"cat_{i}").type) for i in range(26)} == {"int32"}
    assert [table.num_rows for table in tables] == [part.num_rows for part in manifest.parts]
    assert max(part.num_rows for part in manifest.parts) < 1.1 * manifest.num_rows / DAYS
    assert verify(Location.of(whole)) == []
    assert sorted(path.name for path in whole.iterdir() if path.is_file()) == [
        "dataset.json",
        "rejects.jsonl",
    ]


def test_bad_lines_have_their_line_in_the_whole_file(whole):
    rejects = [json.loads(line) for line in (whole / "rejects.jsonl").open()]
    assert [(reject["file"], reject["line"], reject["reason"]) for reject in rejects] == [
        ("train.txt", 101, "field_count"),
        ("train.txt", 40_001, "number"),
    ]
    assert read_manifest(str(whole)).provenance["rejects"]["num_rejects"] == {"field_count": 1, "number": 1}


def test_processes_and_memory_do_not_change_a_byte(raw, whole, tmp_path):
    job(raw, tmp_path / "out", num_days=DAYS, num_processes=2, memory_bytes=900 << 20)
    assert digests(tmp_path / "out") == digests(whole)


def test_a_finished_data_set_is_left_alone_and_another_one_refused(raw, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    job(raw, whole, num_days=DAYS)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
    with pytest.raises(ValueError, match=r"another configuration.*ids: there \"modulo\", now \"hash\""):
        job(raw, whole, num_days=DAYS, ids="hash")
    with pytest.raises(ValueError, match=r"inputs\[0\]\.num_days: there 12, now 3"):
        job(raw, whole, num_days=3)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_days_give_the_rows_of_plain_ones(tmp_path, suffix):
    text = b"\n".join(make_lines(500, seed=9)) + b"\n"
    pack = {"gz": gzip.compress, "zst": zstandard.compress}[suffix]
    for day in (0, 1):
        (tmp_path / f"day_{day}").write_bytes(text)
        (tmp_path / f"day_{day}.{suffix}").write_bytes(pack(text))
    job([tmp_path / "day_0", tmp_path / "day_1"], tmp_path / "plain")
    job([tmp_path / f"day_1.{suffix}", tmp_path / f"day_0.{suffix}"], tmp_path / "packed")
    plain, packed = digests(tmp_path / "plain"), digests(tmp_path / "packed")
    assert {name: packed[name] for name in packed if name != "dataset.json"} == {
        name: plain[name] for name in plain if name != "dataset.json"
    }


def start(raw, out, ids="modulo"):
    command = [sys.executable, "-m", "data.prepare", str(raw), "--out", str(out), "--days", str(DAYS)]
    command += ["--ids", ids, "--processes", "2", *(["--table-rows", "1000"] if ids in ONE_PASS else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_records(process, out, num_records, folder):
    while process.poll() is None and len(list((out / ".prepare" / folder).glob("*.json"))) < num_records:
        time.sleep(0.002)


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("ids", ["modulo", "vocabulary"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_killed_and_started_again_ends_with_the_same_bytes(raw, tmp_path, suffix, ids):
    source = tmp_path / f"{raw.name}{suffix}"
    source.write_bytes(gzip.compress(raw.read_bytes(), 1) if suffix else raw.read_bytes())
    expected = tmp_path / "undisturbed"
    job(source, expected, num_days=DAYS, ids=ids)
    out, folders = tmp_path / "out", ["pieces"] if ids == "modulo" else ["counts", "pieces"]
    kept: dict[Path, int] = {}
    for num_records in (0, 2, 5):
        folder = folders[-1] if num_records > 2 else folders[0]
        process = start(source, out, ids)
        wait_for_records(process, out, num_records, folder)
        kill(process)
        assert not (out / "dataset.json").exists()
        parts = {path: path.stat().st_mtime_ns for path in out.glob("day=*/*.parquet")}
        done = {path: parts[path] for path in parts if _record_of(out, path).exists()}
        assert {path: done[path] for path in kept} == kept, "a finished piece was made again"
        kept = done
    process = start(source, out, ids)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert kept
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert digests(out) == digests(expected)


def _record_of(out, part):
    return out / ".prepare" / "pieces" / f"{part.parent.name}-{part.stem}.json"


@pytest.fixture
def stop_before_the_manifest(monkeypatch):
    """Run a job whose pass is complete, but that stops there."""

    def stop(*arguments):
        raise ValueError("stopped on purpose")

    def run(*arguments, **changes):
        with monkeypatch.context() as patch:
            patch.setattr("data.prepare.job.check_rejects", stop)
            with pytest.raises(ValueError, match="on purpose"):
                job(*arguments, **changes)

    return run


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pieces_that_lost_their_files_meanwhile_are_made_again(
    raw, tmp_path, stop_before_the_manifest, suffix
):
    source = tmp_path / f"{raw.name}{suffix}"
    source.write_bytes(gzip.compress(raw.read_bytes(), 1) if suffix else raw.read_bytes())
    job(source, tmp_path / "undisturbed", num_days=DAYS)
    out = tmp_path / "out"
    stop_before_the_manifest(source, out, num_days=DAYS)
    before = {path: path.stat().st_mtime_ns for path in out.glob("day=*/*.parquet")}
    lost, cut = out / "day=10" / "part-00000.parquet", out / "day=5" / "part-00000.parquet"
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    job(source, out, num_days=DAYS)
    assert digests(out) == digests(tmp_path / "undisturbed")
    made_again = {path for path in before if path.stat().st_mtime_ns != before[path]}
    if suffix:  # a stream goes on from the first lost piece
        assert made_again == {path for path in before if int(path.parent.name.removeprefix("day=")) >= 5}
    else:
        assert made_again == {lost, cut}


def test_counts_that_were_lost_meanwhile_are_made_again(raw, tmp_path, stop_before_the_manifest):
    job(raw, tmp_path / "undisturbed", ids="vocabulary", num_days=DAYS)
    out = tmp_path / "out"
    stop_before_the_manifest(raw, out, ids="vocabulary", num_days=DAYS)
    counts = out / ".prepare" / "counts"
    for name in ("day=3-part-00000.cat_7.run", "day=0-part-00000.rejects.jsonl"):
        (counts / name).unlink()
    cut = next(run for run in counts.glob("day=5-*.run") if run.stat().st_size)
    cut.write_bytes(cut.read_bytes()[:-1])
    job(raw, out, ids="vocabulary", num_days=DAYS)
    assert digests(out) == digests(tmp_path / "undisturbed")


@pytest.mark.parametrize("ids", ["modulo", "vocabulary"])
def test_a_file_of_fewer_lines_than_days(tmp_path, ids):
    source = tmp_path / "train.txt"
    source.write_bytes(b"".join(line + b"\n" for line in make_lines(5)))
    manifest = job(source, tmp_path / "out", ids=ids)
    assert manifest.num_rows == 5
    assert set(manifest.days) < set(range(7))
    assert verify(Location.of(tmp_path / "out")) == []


def test_killed_worker_stops_the_job_and_the_next_one_continues(raw, whole, tmp_path):
    out = tmp_path / "out"
    process = start(raw, out)
    wait_for_records(process, out, 1, "pieces")
    workers = [
        child for child in psutil.Process(process.pid).children() if "data.jobs.worker" in child.cmdline()
    ]
    workers[0].kill()
    output = process.communicate()[0]
    assert process.returncode == 1, output
    assert "SIGKILL" in output
    assert "same command again" in output
    assert not (out / "dataset.json").exists()
    job(raw, out, num_days=DAYS)
    assert digests(out) == digests(whole)


def test_too_many_bad_lines_fail_and_more_may_be_allowed_later(tmp_path):
    lines = make_lines(1000)
    lines[500] = b""
    raw = tmp_path / "day_0"
    raw.write_bytes(b"\n".join(lines))
    with pytest.raises(
        ValueError, match=r"1 of 1,000 lines are bad \(1 field_count\).*rejects\.jsonl"
    ) as error:
        job(raw, tmp_path / "out")
    assert "0.0001" in str(error.value)
    assert json.loads((tmp_path / "out" / "rejects.jsonl").read_text())["line"] == 501
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert job(raw, tmp_path / "out", max_bad_ratio=0.001).num_rows == 999


def test_hopeless_input_stops_early(raw, tmp_path):
    lines = raw.read_bytes().split(b"\n")
    spoiled = tmp_path / "train.txt"
    spoiled.write_bytes(b"\n".join([*lines[:2000], *([b"x" * 200] * 46_000)]))
    with pytest.raises(ValueError, match="the rest cannot make up for it"):
        job(spoiled, tmp_path / "out", num_days=DAYS)
    assert len(list((tmp_path / "out" / ".prepare" / "pieces").glob("*.json"))) < DAYS


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_truncated_file_raises_with_its_readable_lines(tmp_path, suffix):
    text = b"\n".join(make_lines(3000)) + b"\n"
    packed = gzip.compress(text) if suffix == "gz" else zstandard.compress(text, 3)
    raw = tmp_path / f"day_0.{suffix}"
    raw.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        ValueError, match=rf"day_0\.{suffix} is cut off or damaged after [\d,]+ lines"
    ) as error:
        job(raw, tmp_path / "out", max_bad_ratio=0.5)
    manifest = job(raw, tmp_path / "out", max_bad_ratio=1)
    assert f"{manifest.num_rows:,} lines" in str(error.value)
    assert 0 < manifest.num_rows < 3000
    assert [json.loads(line)["reason"] for line in (tmp_path / "out" / "rejects.jsonl").open()] == [
        "truncated"
    ]


def test_bytes_after_a_compressed_file_are_a_reason_with_its_name_and_fail_nothing(tmp_path):
    text = b"\n".join(make_lines(300)) + b"\n"
    raw = tmp_path / "day_0.txt"  # gzip all the same
    raw.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text) + b"more")
    manifest = job(raw, tmp_path / "out")
    assert manifest.num_rows == 300
    assert manifest.provenance["rejects"]["num_rejects"] == {"trailing_bytes": 1}
    reject = json.loads((tmp_path / "out" / "rejects.jsonl").read_text())
    assert (reject["file"], reject["reason"], reject["text"]) == ("day_0.txt", "trailing_bytes", "more")


def test_a_folder_in_use_or_with_other_files_is_refused(raw, tmp_path):
    with locked(Location.of(tmp_path / "used")), pytest.raises(ValueError, match="in use by another live"):
        job(raw, tmp_path / "used")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"other files \(thesis\.tex"):
        job(raw, tmp_path / "other")
    with pytest.raises(ValueError, match="cannot be made or read"):
        job(raw, raw)


def test_job_continues_after_a_full_disk(raw, whole, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        process = start(raw, small / "out")
        output = process.communicate()[0]
        assert process.returncode == 2, output
        assert "the disk is full" in output
        assert not (small / "out" / "dataset.json").exists()
        assert not list((small / "out").rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        process = start(raw, small / "out")
        output = process.communicate()[0]
        assert process.returncode == 0, output
        assert digests(small / "out") == digests(whole)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "rejects"])
def test_damage_is_found_and_repaired_by_the_same_command(raw, whole, tmp_path, capsys, damage):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    part = out / "day=3" / "part-00000.parquet"
    if damage == "flip":
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    elif damage == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    elif damage == "remove":
        part.unlink()
    elif damage == "add":
        shutil.copy(part, out / "day=3" / "part-00009.parquet")
    else:
        (out / "rejects.jsonl").write_text("")
    (problem,) = verify(Location.of(out))
    assert ("rejects.jsonl" if damage == "rejects" else "day=3/part-0000") in problem
    if damage in {"flip", "add"}:  # not seen by the size of a known file
        (out / problem.split()[0]).unlink()
    job(raw, out, num_days=DAYS)
    assert digests(out) == digests(whole)
    assert ("is damaged (" in capsys.readouterr().err) == (damage != "add")
