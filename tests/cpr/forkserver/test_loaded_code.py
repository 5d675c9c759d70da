"""Conditions under which loaded code is out of date."""

import os
import sys
import time
import types
from pathlib import Path

import pytest

from cpr.forkserver.server import STARTED_NS, LoadedCode


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that was loaded from an old file."""
    file = tmp_path / "model.py"
    file.write_text("WIDTH = 1\n")
    os.utime(file, ns=(0, STARTED_NS - 10**12))
    loaded = types.ModuleType("model_of_this_test")
    loaded.__file__ = str(file)
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    return file


@pytest.fixture
def code(module, monkeypatch):
    """Loaded code of this test's module only, as pytest writes its own caches while it runs."""
    monkeypatch.setattr(sys, "modules", {"model_of_this_test": sys.modules["model_of_this_test"]})
    loaded = LoadedCode()
    monkeypatch.undo()
    return loaded


def write(file):
    file.write_text("WIDTH = 2\n")


def replace_with_the_same_time_and_size(file):
    copy = file.with_suffix(".new")
    write(copy)
    os.utime(copy, ns=(0, STARTED_NS - 10**12))
    copy.replace(file)


@pytest.mark.parametrize("change", [write, replace_with_the_same_time_and_size, Path.unlink])
def test_file_that_was_changed_after_its_import_is_noticed(code, module, change):
    assert code.changed() is None
    change(module)
    assert code.changed() == str(module)


def test_file_written_during_imports_counts_as_changed(module):
    os.utime(module, ns=(0, time.time_ns()))
    assert LoadedCode().changed() is not None
