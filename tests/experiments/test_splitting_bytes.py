"""Bytes by formula, in the shapes of recipes."""

import numpy as np
import pytest

from data.synthetic.popularity import Popularity
from experiments import splitting_bytes
from experiments.splitting_bytes import expected_unique, main, saved


@pytest.mark.parametrize(("rows", "draws"), [(50, 30), (5000, 2000), (200_000, 5000)])
def test_expected_unique_rows_are_those_of_drawn_ids(rows, draws):
    popularity, rng = Popularity(rows), np.random.default_rng(0)
    counts = [len(np.unique(popularity.ids(rng.random(draws)))) for _ in range(40)]
    error = np.std(counts, ddof=1) / 40**0.5
    assert expected_unique(rows, draws) == pytest.approx(np.mean(counts), abs=4 * error + 0.01)


def test_expected_unique_rows_of_a_table_without_missing_values():
    assert expected_unique(2, 100) == pytest.approx(1)


def test_command_prints_every_model_of_every_recipe(monkeypatch, capsys):
    monkeypatch.setattr(splitting_bytes, "RANKS", (4,))
    monkeypatch.setattr(splitting_bytes, "ROWS", (1000,) * 26)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 5
    shares = {each.model: each.traffic for each in saved("terabyte", 4)}
    # 26 tables of 4 columns, against one number for each of 4 ranks
    assert shares["lr"].saved_a2a == pytest.approx(1 - 4 / (26 * 4))
    assert f"{shares['lr'].saved_a2a:.1%} of all-to-all" in capsys.readouterr().out + "\n".join(lines)
