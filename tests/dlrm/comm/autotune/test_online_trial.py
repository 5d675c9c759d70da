"""Candidates take turns in the steps of a run."""

import random

import pytest
import torch

from dlrm.comm.autotune import online_trial as module
from dlrm.comm.autotune.online_trial import PAUSE_S, STEPS, OnlineTrial
from dlrm.comm.autotune.significance import LEAST_ROUNDS

CPU = torch.device("cpu")
TURN = 1 + STEPS


def run(trial, step_s):
    """Run a trial; returns the candidate of each step, None in pauses. `step_s` is the time of a step."""
    turns = []
    while not trial.is_over:
        turns.append(trial.turn)
        trial.observe(99.0 if trial.turn is None else step_s(trial.turn, len(turns)))
    return turns


def rounds_of(turns):
    """Steps of each round, without pauses."""
    found = [[]]
    for turn in turns:
        if turn is not None:
            found[-1].append(turn)
        elif found[-1]:
            found.append([])
    return found


def test_turns_are_several_steps_and_another_one_comes_first_each_round(world_of_one):
    trial = OnlineTrial([4, 0, 7], CPU)
    rounds = rounds_of(run(trial, lambda turn, _: 1.0 + turn))
    assert [each[::TURN] for each in rounds[:3]] == [[4, 0, 7], [0, 7, 4], [7, 4, 0]]
    assert all(each == [turn for turn in each[::TURN] for _ in range(TURN)] for each in rounds)
    assert len(rounds) == LEAST_ROUNDS  # one has won all of them
    assert trial.times_s == {4: 5.0, 0: 1.0, 7: 8.0}


@pytest.mark.parametrize(("step_s", "paused"), [(2 * PAUSE_S, 1), (PAUSE_S / 8, 8)])
def test_the_best_candidate_is_used_between_rounds(step_s, paused, world_of_one):
    trial = OnlineTrial([0, 1], CPU)
    turns = run(trial, lambda turn, _: step_s * (1 + turn))
    assert turns[: 2 * TURN + paused + 1] == [0] * TURN + [1] * TURN + [None] * paused + [1]
    assert turns.count(None) == paused * (LEAST_ROUNDS - 1)


def test_completed_rounds_are_reported_and_enough_of_them_are_conclusive(world_of_one, monkeypatch):
    monkeypatch.setattr(module, "MOST_ROUNDS", LEAST_ROUNDS + 1)
    trial = OnlineTrial([0, 1], CPU)
    rounds = []
    while not trial.is_over:
        assert trial.is_conclusive == (len(rounds) >= LEAST_ROUNDS)
        if trial.observe(1.0):
            rounds.append(trial.times_s)
    assert trial.is_conclusive
    assert rounds == [{0: 1.0, 1: 1.0}] * (LEAST_ROUNDS + 1)


def test_a_slower_candidate_drops_out(world_of_one):
    trial = OnlineTrial([4, 0, 7], CPU)
    noise = random.Random(1)
    rounds = rounds_of(run(trial, lambda turn, _: 9.0 if turn == 4 else noise.uniform(1.0, 2.0)))
    assert all({*each} == {0, 4, 7} for each in rounds[:LEAST_ROUNDS])
    assert rounds[LEAST_ROUNDS:]
    assert all({*each} == {0, 7} for each in rounds[LEAST_ROUNDS:])
    assert trial.times_s[4] > 2 * max(trial.times_s[0], trial.times_s[7])


def test_the_first_step_of_a_turn_does_not_count(world_of_one):
    trial = OnlineTrial([0, 1], CPU)
    turns = []

    def step_s(turn, _):
        turns.append(turn)
        return 100.0 if len(turns) % TURN == 1 else 1.0 + turn

    run(trial, step_s)
    assert trial.times_s == {0: 1.0, 1: 2.0}
