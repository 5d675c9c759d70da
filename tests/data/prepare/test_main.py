"""The command line: its flags and exit codes."""

import errno

import pytest

from data.prepare import __main__ as command
from data.prepare.pool import WorkerDiedError

FLAGS = [
    "--cap", "--days", "--help", "--ids", "--max-bad-ratio", "--memory", "--min-count", "--out",
    "--processes", "--table-rows", "--verify",
]  # fmt: skip


def test_flags_are_these():
    found = [flag for action in command.parser()._actions for flag in action.option_strings]
    assert sorted(flag for flag in found if flag.startswith("--")) == FLAGS


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("change this"), 2, "change this"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "no room to write"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error"),
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
    ],
)
def test_mistakes_are_code_2(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verify_of_no_data_set_is_code_1(capsys, tmp_path):
    assert command.main(["--verify", str(tmp_path)]) == 1
    assert "not a finished data set" in capsys.readouterr().out
