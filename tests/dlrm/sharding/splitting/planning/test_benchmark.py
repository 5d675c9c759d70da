"""Alternatives take turns until one has clearly won; the slowest rank's times count."""

import time
from itertools import cycle

import torch

from dlrm.comm.autotune.online_trial import LEAST_ROUNDS
from dlrm.sharding.splitting.planning import planner as module
from dlrm.sharding.splitting.planning.planner import CALLS, WARM_UP, benchmark

CPU = torch.device("cpu")


def test_alternatives_take_turns_and_the_slower_one_takes_longer(world_of_one):
    order = []

    def alternative(name, seconds):
        def work():
            order.append(name)
            time.sleep(seconds)

        return work

    quick, slow = benchmark([alternative("quick", 0.001), alternative("slow", 0.02)], CPU)
    assert 0.001 <= quick < 0.02 <= slow
    rounds = order[2 * WARM_UP :]
    turns = rounds[:: 1 + CALLS]
    assert turns[:4] == ["quick", "slow", "slow", "quick"]  # who comes first changes
    assert rounds == [name for name in turns for _ in range(1 + CALLS)]
    assert len(turns) == 2 * LEAST_ROUNDS  # it has won all of them


def test_the_first_call_of_a_turn_is_not_timed(world_of_one, monkeypatch):
    monkeypatch.setattr(module, "LASTS_S", 0.0)
    seconds = cycle([0.02, *[0.001] * CALLS])
    for _ in range(WARM_UP):
        next(seconds)
    calls = []

    def work():
        calls.append(time.sleep(next(seconds) if len(calls) >= WARM_UP else 0.0))

    assert WARM_UP % (1 + CALLS) == 0
    assert benchmark([work], CPU)[0] < 0.02 / (1 + CALLS)


def test_rounds_without_a_clear_winner_continue_until_the_time_limit(world_of_one, monkeypatch):
    monkeypatch.setattr(module, "LASTS_S", 0.0)
    calls = [0, 0]
    # each wins every other round
    naps = [0.002, 0.004]

    def alternative(number):
        def work():
            calls[number] += 1
            rounds_done = (calls[number] - WARM_UP - 1) // (1 + CALLS)
            time.sleep(naps[(rounds_done + number) % 2])

        return work

    benchmark([alternative(0), alternative(1)], CPU)
    assert calls == [WARM_UP + LEAST_ROUNDS * (1 + CALLS)] * 2
