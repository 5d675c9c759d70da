"""Contenders take turns until rounds agree, and the slowest rank's times count."""

import time
from itertools import cycle

import pytest
import torch

from dlrm.sharding.splitting import race as module
from dlrm.sharding.splitting.race import CALLS, LEAST_ROUNDS, MOST_ROUNDS, WARM_UP, is_over, race, typical

CPU = torch.device("cpu")


def test_all_take_turns_and_what_is_slower_takes_longer(world_of_one):
    order = []

    def contender(name, seconds):
        def work():
            order.append(name)
            time.sleep(seconds)

        return work

    quick, slow = race([contender("quick", 0.001), contender("slow", 0.02)], CPU)
    assert 0.001 <= quick < 0.02 <= slow
    rounds = order[2 * WARM_UP :]
    turns = rounds[:: 1 + CALLS]
    assert turns[:4] == ["quick", "slow", "slow", "quick"]  # who comes first changes
    assert rounds == [name for name in turns for _ in range(1 + CALLS)]
    assert len(turns) == 2 * LEAST_ROUNDS  # all of them said the same


def test_a_call_after_others_does_not_count(world_of_one, monkeypatch):
    monkeypatch.setattr(module, "LASTS_S", 0.0)
    seconds = cycle([0.02, *[0.001] * CALLS])
    for _ in range(WARM_UP):
        next(seconds)
    calls = []

    def work():
        calls.append(time.sleep(next(seconds) if len(calls) >= WARM_UP else 0.0))

    assert WARM_UP % (1 + CALLS) == 0
    assert race([work], CPU)[0] < 0.02 / (1 + CALLS)


def test_rounds_that_do_not_agree_go_on_until_time_is_up(world_of_one, monkeypatch):
    monkeypatch.setattr(module, "LASTS_S", 0.0)
    calls = [0, 0]
    # each wins every other round
    naps = [0.002, 0.004]

    def contender(number):
        def work():
            calls[number] += 1
            rounds_done = (calls[number] - WARM_UP - 1) // (1 + CALLS)
            time.sleep(naps[(rounds_done + number) % 2])

        return work

    race([contender(0), contender(1)], CPU)
    assert calls == [WARM_UP + LEAST_ROUNDS * (1 + CALLS)] * 2


def test_rounds_go_on_while_they_disagree():
    first, second = [1.0, 2.0], [2.0, 1.0]
    assert not is_over([])
    assert not is_over([first] * (LEAST_ROUNDS - 1))
    assert is_over([first] * LEAST_ROUNDS)
    assert not is_over([first] * LEAST_ROUNDS + [second])
    assert is_over([first, second] * (MOST_ROUNDS // 2))


def test_times_are_compared_within_rounds():
    """The machine is three times slower from the third round on; the second contender takes a tenth less."""
    rounds = [[speed, 0.9 * speed] for speed in (1.0, 1.0, 3.0, 3.0, 3.0)]
    rounds[1][1] *= 5  # somebody else was at work for a moment
    assert typical(rounds) == [3.0, pytest.approx(2.7)]


def test_an_error_of_a_contender_is_no_time(world_of_one):
    with pytest.raises(ZeroDivisionError):
        race([lambda: 1 / 0], CPU)
