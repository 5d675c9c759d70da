"""Which contenders continue in a cell of the experiment on exchanges, and when the cell ends."""

import pytest

from experiments.communication.rounds import SHARED_ROUNDS, Effort, is_over, still_in

EFFORT = Effort(full_rounds=2, least_rounds=6, most_rounds=20, seconds=10.0, reach=0.01)
STEPS = {"nothing": 0.1, "ddp": 9.0, "dense": 1.0, "tree": 1.02, "ring_fp16": 1.3, "ring_int8": 1.6}


def test_only_contenders_close_to_the_best_continue():
    names = {"nothing", "ddp", "dense", "tree"}
    assert {*still_in([STEPS] * 3, "dense")} == names
    assert {*still_in([STEPS], "dense")} == names | {"ring_fp16"}  # one round may have been bad luck
    assert {*still_in([STEPS] * 3, "ring_int8")} == names | {"ring_int8"}


def test_contender_with_varying_times_continues():
    rounds = [STEPS, STEPS, STEPS | {"ring_int8": 1.0}]
    assert "ring_int8" in still_in(rounds, "dense")
    assert "ring_fp16" not in still_in(rounds, "dense")


def test_contenders_that_are_not_comparable_must_be_close_to_the_best_of_all():
    rounds = [STEPS | {"power_sgd": 0.5, "star_0.001": 0.51, "all_gather_0.001": 0.7}] * 3
    found = {*still_in(rounds, "dense")}
    assert {"power_sgd", "star_0.001", "dense", "tree"} <= found
    assert "all_gather_0.001" not in found


def test_only_comparable_contenders_continue_after_the_shared_rounds():
    steps = STEPS | {"power_sgd": 0.5, "ddp_fp16": 1.01}
    assert "power_sgd" in still_in([steps] * (SHARED_ROUNDS - 1), "ring_int8")
    assert still_in([steps] * SHARED_ROUNDS, "ring_int8") == ["ddp_fp16", "dense", "ring_int8", "tree"]


def test_contender_that_left_does_not_return():
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
def test_cell_ends_when_the_ratios_of_auto_are_known(rounds, elapsed_s, expected):
    assert is_over(rounds, "dense", EFFORT, elapsed_s) is expected
