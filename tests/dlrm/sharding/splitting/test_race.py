"""Contenders take turns, and the slowest rank's times count."""

import time

import pytest
import torch

from dlrm.sharding.splitting import race as module
from dlrm.sharding.splitting.race import LEAST_TURNS, WARM_UP, race

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
    in_turns = order[2 * WARM_UP + 2 :]
    assert set(in_turns[::4]) == set(in_turns[3::4]) == {"quick"}  # who comes first changes
    assert in_turns.count("quick") == in_turns.count("slow") >= LEAST_TURNS


def test_slow_steps_take_the_least_turns(world_of_one, monkeypatch):
    monkeypatch.setattr(module, "LASTS_S", 0.01)
    turns = []
    race([lambda: turns.append(time.sleep(0.005))], CPU)
    assert len(turns) == WARM_UP + 1 + LEAST_TURNS


def test_an_error_of_a_contender_is_no_time(world_of_one):
    with pytest.raises(ZeroDivisionError):
        race([lambda: 1 / 0], CPU)
