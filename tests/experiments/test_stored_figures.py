"""Figures that are computed again from the stored rows are the stored ones."""

import json
from math import nan

import pytest

from experiments import mstopk, precision, rare_rows, sensitivity
from experiments.codecs import run as codecs
from experiments.communication import figures as communication
from experiments.harness.record import RESULTS
from experiments.models import run as models
from experiments.scaling import run as scaling
from experiments.splitting import figures as splitting
from experiments.throughput import run as throughput


def splitting_rows(rows):
    """Rows as they are made now: bytes of ids lay in rows of their own."""
    ids = {(row["model"], row["workers"]): row["id_bytes"] for row in rows if row["key"].startswith("ids")}
    return [row | {"id_bytes": ids[row["model"], row["workers"]]} if "split" in row else row for row in rows]


FIGURES = {
    "codecs": lambda stored: codecs.figures_of(stored["rows"]),
    "communication": lambda stored: communication.figures_of(stored["rows"])[0],
    "models": lambda stored: models.figures_of(stored["rows"]),
    "mstopk": lambda stored: mstopk.figures_of(stored["rows"]),
    "precision": lambda stored: precision.figures_of(stored["rows"]),
    "rare_rows": lambda stored: rare_rows.figures_of(stored["rows"]),
    "scaling": lambda stored: scaling.figures_of(stored["rows"], stored["config"]["blocked_share"])[0],
    "sensitivity": lambda stored: sensitivity.figures_of(stored["rows"]),
    "splitting": lambda stored: splitting.figures_of(splitting_rows(stored["rows"]))[0],
    "throughput": lambda stored: throughput.figures_of(stored["rows"], stored["config"]["rounds"]),
}


def with_nan(figures):
    return {name: nan if value is None else value for name, value in figures.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_stored_figures_follow_from_the_stored_rows(name):
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    expected = with_nan(stored["figures"])
    assert with_nan(FIGURES[name](stored)) == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_stored_notes_follow_from_the_stored_rows():
    """They name the cells behind extremes, and commits of rows that were kept."""
    for name, module in (("communication", communication), ("splitting", splitting)):
        stored = json.loads((RESULTS / f"{name}.json").read_text())
        rows = splitting_rows(stored["rows"]) if module is splitting else stored["rows"]
        assert module.figures_of(rows)[1] == stored["notes"]
