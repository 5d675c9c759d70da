"""The command line."""

import argparse

import pytest

from dlrm.train import parse, read


def test_flags_are_pinned(monkeypatch):
    flags = []
    add_argument = argparse._ActionsContainer.add_argument

    def spy(self, *names, **options):
        flags.extend(names)
        return add_argument(self, *names, **options)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", spy)
    parse(["--recipe", "tiny"])
    assert flags == ["-h", "--help", "--recipe", "--resume", "--warm-start", "--allow", "--set", "--sharding"]


def test_set_may_be_repeated():
    arguments = parse(["--recipe", "tiny", "--set", "a.b=1", "c.d=2", "--set", "e.f=3"])
    assert arguments.overrides == ["a.b=1", "c.d=2", "e.f=3"]


def test_sharding_is_short_for_an_override():
    arguments = parse(["--recipe", "tiny", "--set", "a.b=1", "--sharding", "des"])
    assert arguments.overrides == ["sharding.strategy=des", "a.b=1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--recipe"),
        (["--recipe"], "expected one argument"),
        (["--recipe", "tiny", "--epochs", "3"], "unrecognized arguments: --epochs 3; see --help"),
        (["--rec", "tiny"], "--recipe"),
        (["--resume", "a", "--warm-start", "b"], "not allowed with"),
        (["--recipe", "tiny", "--allow", "grow:a"], "--allow says how a save may differ"),
        (["--recipe", "tiny", "--sharding", "best"], "choose from '?torchrec'?, '?des'?, '?auto"),
    ],
)
def test_wrong_flags_raise_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_a_run_that_is_resumed_takes_no_warm_start(tmp_path):
    arguments = parse(["--resume", str(tmp_path), "--set", "train.warm_start=elsewhere"])
    with pytest.raises(ValueError, match="give --warm-start instead of --resume"):
        read(arguments)
