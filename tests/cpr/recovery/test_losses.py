"""The portion of lost samples, and who lost what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.recovery.losses import lost_workers, pls_added


def test_a_lost_node_costs_its_samples_since_the_save():
    # one of 4 workers, 600 of 10,000 samples: the paper's 600 / (10,000 x 4)
    assert pls_added([1.0], 1600, 1000, 10_000, 4) == pytest.approx(0.015)
    assert pls_added([1.0, 1.0], 1600, 1000, 10_000, 4) == pytest.approx(0.03)


def test_nothing_lost_costs_nothing_even_if_the_total_is_unknown():
    assert pls_added([], 1600, 1000, None, 4) == 0.0
    assert pls_added([1.0], 1600, 1000, None, 4) is None


def test_who_lost_what():
    assert lost_workers(4, {0: 10, 2: 4, 3: 0}, {0: 10, 2: 16, 3: 0}) == {1: 1.0, 2: 0.75}


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 10**9), st.integers(0, 10**9))
def test_pls_is_a_portion(lost, done, saved):
    assert 0 <= pls_added(lost, done, saved, 10**9, 8) <= 1
