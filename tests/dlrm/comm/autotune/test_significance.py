"""Rounds on a machine that is not always equally fast."""

import random

import pytest

from dlrm.comm.autotune.significance import LEAST_ROUNDS, running, typical


def rounds(won, lost):
    """Of two, the first of which has won so many, and lost so many."""
    return [{4: 1.0, 7: 2.0}] * won + [{4: 2.0, 7: 1.0}] * lost


@pytest.mark.parametrize(
    ("won", "lost", "left"),
    [
        (1, 0, [4, 7]),
        (LEAST_ROUNDS - 1, 0, [4, 7]),
        (LEAST_ROUNDS, 0, [4]),
        (LEAST_ROUNDS, 1, [4, 7]),
        (13, 3, [4]),
        (12, 4, [4, 7]),
        (23, 9, [4, 7]),
        (24, 8, [4]),
        (3, 13, [7]),
        (16, 16, [4, 7]),
    ],
)
def test_contenders_that_clearly_lost_to_the_fastest_drop_out(won, lost, left):
    assert running(rounds(won, lost)) == left


def test_equal_contenders_remain():
    assert running([{4: 1.0, 7: 1.0, 1: 1.0}] * 20) == [4, 7, 1]


def test_the_others_continue_without_a_dropped_contender():
    """The third drops out after eight rounds, in which the others won four each."""
    early = [{0: 1.0, 1: 0.9, 2: 5.0}, {0: 1.0, 1: 1.1, 2: 5.0}] * (LEAST_ROUNDS // 2)
    assert running(early) == [0, 1]
    found = [*early, *[{0: 1.0, 1: 1.1}] * 10]
    assert running(found) == [0, 1]  # won 14, lost 4
    found.append({0: 1.0, 1: 1.1})
    assert running(found) == [0]  # won 15, lost 4


def test_times_are_compared_within_rounds():
    """The machine is three times slower from the third round on; the second contender takes a tenth less."""
    found = [{0: speed, 1: 0.9 * speed} for speed in (1.0, 1.0, 3.0, 3.0, 3.0)]
    found[1][1] *= 5  # other load for a moment
    assert typical(found) == {0: 3.0, 1: pytest.approx(2.7)}


def test_a_contender_that_dropped_out_before_the_machine_became_slower_gains_nothing():
    found = [{0: 1.0, 1: 1.1, 2: 1.5}] * 8 + [{1: 3.3, 0: 3.0}] * 12
    assert typical(found) == {0: pytest.approx(3.0), 1: pytest.approx(3.3), 2: pytest.approx(4.5)}


def test_the_faster_of_two_rarely_drops_out_though_every_round_is_checked():
    """It is 3 % faster, and rounds differ by 5 %."""
    draws, wrong = random.Random(0), 0
    for _ in range(300):
        found = []
        while len(found) < 32 and (not found or len(running(found)) > 1):
            found.append({0: draws.gauss(1.0, 0.05), 1: draws.gauss(1.03, 0.05)})
        wrong += running(found) == [1]
    assert wrong <= 3
