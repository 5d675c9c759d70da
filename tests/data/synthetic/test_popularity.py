import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.synthetic.popularity import MovingPopularity, Popularity


@pytest.mark.parametrize("rows", [1_000, 20_263, 1_000_000, 48_937_457])
def test_top_percent_of_ids_gets_three_quarters_of_the_accesses(rows):
    law = Popularity(rows)
    assert law.coverage(round(0.01 * (rows - 1))) == pytest.approx(0.75, abs=0.01)
    ids = law.ids(np.random.default_rng(0).random(200_000))
    assert np.mean(ids <= round(0.01 * (rows - 1))) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("top_coverage", [0.3, 0.5, 0.9])
def test_the_skew_can_be_chosen(top_coverage):
    law = Popularity(200_000, top_coverage)
    assert law.coverage(2_000) == pytest.approx(top_coverage, abs=0.01)


@given(
    st.integers(2, 50_000_000),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1).map(
        lambda quantiles: np.array(sorted(quantiles))
    ),
)
def test_ids_stay_inside_the_table_and_grow_with_the_quantile(rows, quantiles):
    ids = Popularity(rows).ids(quantiles)
    assert ids.min() >= 1
    assert ids.max() < rows
    assert (np.diff(ids) >= 0).all()


@pytest.mark.parametrize("rows", [2, 3, 24, 5_000])
def test_ids_are_drawn_with_the_stated_probabilities(rows):
    law = Popularity(rows)
    probabilities = law.probabilities(rows - 1)
    assert probabilities.sum() == pytest.approx(1)
    draws = 500_000
    counts = np.bincount(law.ids(np.random.default_rng(1).random(draws)), minlength=rows)[1:]
    deviations = (counts - draws * probabilities) / np.sqrt(
        draws * probabilities * (1 - probabilities) + 1e-9
    )
    assert np.abs(deviations).max() < 6
    assert (np.diff(probabilities) < 0).all()


def moving(rows, drift, day):
    return MovingPopularity(rows, drift, day, np.random.default_rng(2))


@given(st.integers(2, 3_000), st.integers(0, 5), st.floats(0, 1, exclude_max=True))
def test_every_order_is_a_permutation(rows, day, quantile):
    ids = np.arange(1, rows)
    reordered = moving(rows, 0.4, day).reorder(ids, np.full(rows - 1, quantile))
    assert sorted(reordered) == ids.tolist()


def test_the_stated_share_of_the_traffic_moves_each_day():
    ids = Popularity(20_000).ids(np.random.default_rng(3).random(100_000))
    uniform = np.random.default_rng(4).random(100_000)
    days = [moving(20_000, 0.1, day).reorder(ids, uniform) for day in range(4)]
    assert (days[0] == ids).all()
    for day, reordered in enumerate(days):
        assert np.mean(reordered == ids) == pytest.approx(0.9**day, abs=0.01)
    shares = [np.bincount(reordered, minlength=20_000) / 100_000 for reordered in days]
    moved = [np.abs(today - yesterday).sum() / 2 for yesterday, today in itertools.pairwise(shares)]
    assert all(0.05 < share <= 0.13 for share in moved)
