"""Conditions under which a process cannot be forked, or its code is out of date."""

import os
import subprocess
import sys
import time
import types

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


def test_written_file_has_changed(code, module):
    assert code.changed() is None
    module.write_text("WIDTH = 2\n")
    assert code.changed() == str(module)


def test_replaced_file_with_the_same_time_and_size_has_changed(code, module):
    copy = module.with_suffix(".new")
    copy.write_text("WIDTH = 2\n")
    os.utime(copy, ns=(0, STARTED_NS - 10**12))
    copy.replace(module)
    assert code.changed() == str(module)


def test_removed_file_has_changed(code, module):
    module.unlink()
    assert code.changed() == str(module)


def test_file_written_during_imports_counts_as_changed(module):
    os.utime(module, ns=(0, time.time_ns()))
    assert LoadedCode().changed() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads proc(5)")
@pytest.mark.parametrize("threads", [0, 1])
def test_process_with_threads_is_not_forked(threads):
    program = (
        "import threading, time; from cpr.forkserver.server import why_not_to_fork\n"
        f"for _ in range({threads}): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print(why_not_to_fork())"
    )
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("other threads run in it" in asked.stdout) == bool(threads)
