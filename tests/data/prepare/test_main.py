"""The command line: its flags and exit codes."""

import errno
import re
from dataclasses import replace

import pytest

from data.dataset import DatasetManifest, Part
from data.jobs.pool import WorkerDiedError
from data.prepare import __main__ as command
from tests.data.prepare.conftest import make_lines

MANIFEST = DatasetManifest(features=(), parts=(), provenance={"rejects": {"num_rejects": {}}})


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("change this"), 2, "change this"),
        (OSError(errno.ENOSPC, "the disk is full"), 2, "the disk is full"),
        (OSError(errno.EIO, "Input/output error"), 1, "Start the same command again"),
        (PermissionError(errno.EACCES, "Permission denied", "day_0"), 2, "Change the permissions"),
        (OSError(errno.EROFS, "Read-only file system", "out"), 2, "another --out"),
        (WorkerDiedError("worker 7 ended"), 1, "Start the same command again"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_errors_have_a_code_and_a_sentence(monkeypatch, capsys, tmp_path, error, code, words):
    def fail(config):
        raise error

    monkeypatch.setattr(command, "prepare", fail)
    assert command.main(["day_0", "--out", str(tmp_path)]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["day_0"], "--out"),
        (["--out", "x"], "at least one raw file"),
        (["missing", "--out", "x"], "missing is not a file"),
        (["day_0", "--out", "x", "--memory", "much"], "not a size"),
        (["day_0", "--out", "x", "--memory", "-5G"], "'-5G' is not a size"),
        (["day_0", "--out", "x", "--cluster", "tcp://h:1", "--processes", "2"], "is for this machine"),
        (["day_0", "--out", "x", "--min-count", "3"], "--min-count is for --ids vocabulary"),
        (["day_0", "--out", "x", "--ids", "raw", "--cap", "10000000"], "with --ids raw nothing reads it"),
        (["--verify", "x", "--ids", "hash"], "leave out raw files and other flags"),
        (["day_0", "--verify", "x"], "leave out raw files and other flags"),
    ],
)
def test_mistakes_are_code_2(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        (
            ["train.txt"],
            "all of Criteo Kaggle, these shares of a table's values share a row: cat_0 1%",
        ),
        (["train.txt", "--table-rows", "kaggle"], "cat_7 63%, cat_8 56%, cat_9 63%"),
        (["day_0", "--ids", "hash"], "--ids hash merges values by chance. If this is all of Criteo Terabyte"),
    ],
)
def test_shares_of_collisions_are_printed_at_the_end(monkeypatch, capsys, arguments, shares):
    monkeypatch.setattr(command, "prepare", lambda config: MANIFEST)
    assert command.main([*arguments, "--out", "x"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert shares in last
    assert "--ids vocabulary keeps values apart" in last


@pytest.mark.parametrize("flags", [["--ids", "vocabulary"], ["--ids", "raw"], ["--table-rows", "1000"]])
def test_unknown_collisions_are_not_printed(monkeypatch, capsys, flags):
    monkeypatch.setattr(command, "prepare", lambda config: MANIFEST)
    assert command.main(["day_0", "--out", "x", *flags]) == 0
    assert capsys.readouterr().out == "x: 0 rows on 0 days in 0 files; 0 bad lines\n"


@pytest.mark.parametrize(
    ("days", "said"),
    [
        ((0, 1, 2), ""),
        ((3, 4), ""),
        ((0, 2, 5), "there is nothing of day 1, 3 to 4, but of earlier and of later"),
        ((0, 10**18), f"there is nothing of day 1 to {10**18 - 1}, but"),
        (tuple(range(0, 30, 2)), "15, 17, 19, ..., but of earlier"),
    ],
)
def test_days_that_are_missing_between_others_are_named(monkeypatch, capsys, days, said):
    def part(day):
        return Part(path=f"{day}", day=day, num_rows=1, row_groups=(1,), num_bytes=1, sha256="")

    manifest = replace(MANIFEST, parts=tuple(map(part, days)))
    monkeypatch.setattr(command, "prepare", lambda config: manifest)
    assert command.main(["day_0", "--out", "x", "--ids", "raw"]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert "bad lines" in first
    assert len(more) == bool(said)
    assert said in "".join(more)


def test_bytes_after_compressed_data_are_reported(monkeypatch, capsys):
    rejects = {"num_rejects": {"trailing_bytes": 2, "hex": 1}}
    monkeypatch.setattr(command, "prepare", lambda config: replace(MANIFEST, provenance={"rejects": rejects}))
    assert command.main(["day_0", "--out", "x", "--ids", "raw"]) == 0
    first, told = capsys.readouterr().out.splitlines()
    assert first.endswith("; 1 bad line")
    assert told.startswith("2 of the raw files hold bytes after the end")
    assert "x/rejects.jsonl names the files" in told


def test_verify_of_no_data_set_is_code_1(capsys, tmp_path):
    assert command.main(["--verify", str(tmp_path)]) == 1
    assert "not a finished data set" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["/proc/none", "{}/" + "a" * 300])
def test_an_output_folder_that_cannot_be_made_is_code_2(capsys, tmp_path, raw_file, out):
    path = raw_file(make_lines(5))
    assert command.main([str(path), "--out", out.format(tmp_path), "--table-rows", "10"]) == 2
    assert re.search(
        r"data\.prepare: .* cannot be made or read \(.*\); choose another --out", capsys.readouterr().err
    )
