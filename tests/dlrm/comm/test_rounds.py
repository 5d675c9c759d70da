"""Rounds on a machine that is not always equally fast."""

import pytest

from dlrm.comm.rounds import LEAST_ROUNDS, agree, typical


def test_rounds_agree_when_the_same_one_has_won_enough_of_them_in_a_row():
    first, second = [1.0, 2.0], [2.0, 1.0]
    assert not agree([])
    assert not agree([first] * (LEAST_ROUNDS - 1))
    assert agree([first] * LEAST_ROUNDS)
    assert not agree([*[first] * LEAST_ROUNDS, second])
    assert agree([second, *[first] * LEAST_ROUNDS])


def test_times_are_compared_within_rounds():
    """The machine is three times slower from the third round on; the second contender takes a tenth less."""
    rounds = [[speed, 0.9 * speed] for speed in (1.0, 1.0, 3.0, 3.0, 3.0)]
    rounds[1][1] *= 5  # somebody else was at work for a moment
    assert typical(rounds) == [3.0, pytest.approx(2.7)]
