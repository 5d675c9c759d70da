"""Rounds of contenders in turns."""

import pytest

from experiments.harness import turns
from experiments.harness.turns import Effort, ratios, take_turns

EFFORT = Effort(full_rounds=2, least_rounds=6, most_rounds=20, seconds=10.0, reach=0.01)


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
def test_rounds_are_enough_when_the_ratios_are_known(rounds, elapsed_s, expected):
    assert EFFORT.is_enough(rounds, elapsed_s, "dense", ["ddp"]) is expected


def test_contenders_take_turns_until_none_remains(monkeypatch):
    monkeypatch.setattr(turns, "of_rank_0", lambda function: function())
    left = [["ddp", "dense"], ["ddp"], []]
    asked = []

    def remaining(rounds, elapsed_s):
        asked.append([*map(set, rounds)])
        return left[len(rounds) - 1]

    rounds = take_turns(["tree", "ddp", "dense"], lambda name: float(len(name)), remaining)
    assert rounds == [{"tree": 4, "ddp": 3, "dense": 5}, {"ddp": 3, "dense": 5}, {"ddp": 3}]
    assert asked[-1] == [{"tree", "ddp", "dense"}, {"ddp", "dense"}, {"ddp"}]
    assert ratios(rounds, "dense", "ddp") == [3 / 5, 3 / 5]
