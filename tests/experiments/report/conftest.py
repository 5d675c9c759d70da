"""Stored results for the tests of the report."""

import pytest

from experiments.harness.record import Record


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Stores a finished result, or an unfinished one without figures, in `tmp_path`."""
    monkeypatch.setattr("sys.argv", ["pytest"])  # results name the arguments they were measured with

    def _store(name, figures=None, notes=None, config=None, seeds=(1, 2, 3)):
        record = Record(name, config or {}, seeds=seeds, folder=tmp_path)
        record.measure("a", lambda: {"took_s": 1.5})
        if figures is not None:
            record.finish(figures, notes)
        return record.path

    return _store
