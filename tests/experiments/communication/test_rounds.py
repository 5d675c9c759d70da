"""Who takes further turns in a cell of the experiment of exchanges, and when it is over."""

import pytest

from experiments.communication.rounds import SHARED_ROUNDS, Effort, is_over, still_in

EFFORT = Effort(full_rounds=2, least_rounds=6, most_rounds=20, seconds=10.0, reach=0.01)
STEPS = {"nothing": 0.1, "ddp": 9.0, "dense": 1.0, "tree": 1.02, "ring_fp16": 1.3, "ring_int8": 1.6}


def test_only_those_close_to_the_best_go_on():
    names = {"nothing", "ddp", "dense", "tree"}
    assert {*still_in([STEPS] * 3, "dense")} == names
    assert {*still_in([STEPS], "dense")} == names | {"ring_fp16"}  # one round may have been bad luck
    assert {*still_in([STEPS] * 3, "ring_int8")} == names | {"ring_int8"}


def test_who_may_have_had_bad_luck_goes_on():
    rounds = [STEPS, STEPS, STEPS | {"ring_int8": 1.0}]
    assert "ring_int8" in still_in(rounds, "dense")
    assert "ring_fp16" not in still_in(rounds, "dense")


def test_those_that_leave_more_behind_are_compared_with_the_best_of_all():
    rounds = [STEPS | {"power_sgd": 0.5, "star_0.001": 0.51, "all_gather_0.001": 0.7}] * 3
    found = {*still_in(rounds, "dense")}
    assert {"power_sgd", "star_0.001", "dense", "tree"} <= found
    assert "all_gather_0.001" not in found


def test_after_the_shared_rounds_only_those_that_auto_is_compared_with_go_on():
    steps = STEPS | {"power_sgd": 0.5, "ddp_fp16": 1.01}
    assert "power_sgd" in still_in([steps] * (SHARED_ROUNDS - 1), "ring_int8")
    assert still_in([steps] * SHARED_ROUNDS, "ring_int8") == ["ddp_fp16", "dense", "ring_int8", "tree"]


def test_who_was_left_out_stays_out():
    rounds = [STEPS] * 3 + [{name: STEPS[name] for name in ("nothing", "ddp", "dense")}]
    assert still_in(rounds, "dense") == ["ddp", "dense", "nothing"]


@pytest.mark.parametrize(
    ("rounds", "elapsed_s", "expected"),
    [
        ([{"ddp": 2.0, "dense": 1.0}] * 5, 99.0, False),  # too few, however long they took
        ([{"ddp": 2.0, "dense": 1.0}] * 6, 0.0, True),  # all alike
        ([{"ddp": 2.0 + number % 3, "dense": 1.0} for number in range(8)], 9.0, False),
        ([{"ddp": 2.0 + number % 3, "dense": 1.0} for number in range(8)], 11.0, True),  # time is up
        ([{"ddp": 2.0 + number % 3, "dense": 1.0} for number in range(20)], 0.0, True),
        ([{"ddp": 2.0, "dense": 1.0, "power_sgd": 1.0 + number % 3} for number in range(8)], 0.0, True),
    ],
)
def test_a_cell_is_over_when_what_auto_is_compared_with_is_known(rounds, elapsed_s, expected):
    assert is_over(rounds, "dense", EFFORT, elapsed_s) is expected
