"""Finalists take turns in the steps of a run."""

import random

import torch

from dlrm.comm.rounds import LEAST_ROUNDS
from dlrm.comm.trial import MOST_ROUNDS, STEPS, Trial

CPU = torch.device("cpu")


def run(trial, step_s):
    """Whose steps they were until it was over; `step_s` says how long the next one of each takes."""
    turns = []
    while not trial.is_over:
        turns.append(trial.turn)
        trial.observe(step_s(trial.turn, len(turns)))
    return turns


def test_turns_are_several_steps_and_another_one_comes_first_each_round(world_of_one):
    trial = Trial([4, 0, 7], CPU)
    turns = run(trial, lambda turn, _: 1.0 + turn)
    assert turns[:: 1 + STEPS][:6] == [4, 0, 7, 0, 7, 4]
    assert turns == [turn for turn in turns[:: 1 + STEPS] for _ in range(1 + STEPS)]
    assert len(turns) == LEAST_ROUNDS * 3 * (1 + STEPS)  # one has won all rounds
    assert trial.times_s == {4: 5.0, 0: 1.0, 7: 8.0}


def test_who_has_lost_takes_no_more_turns(world_of_one):
    trial = Trial([4, 0, 7], CPU)
    steps = LEAST_ROUNDS * 3 * (1 + STEPS)
    noise = random.Random(1)
    turns = run(trial, lambda turn, _: 9.0 if turn == 4 else noise.uniform(1.0, 2.0))
    assert 4 in turns[:steps]
    assert 4 not in turns[steps:]
    assert {0, 7} == set(turns[steps:])
    assert trial.times_s[4] > 2 * max(trial.times_s[0], trial.times_s[7])


def test_the_first_step_of_a_turn_does_not_count(world_of_one):
    trial = Trial([0, 1], CPU)
    run(trial, lambda turn, step: 100.0 if step % (1 + STEPS) == 1 else 1.0 + turn)
    assert trial.times_s == {0: 1.0, 1: 2.0}


def test_rounds_without_a_clear_winner_come_to_an_end(world_of_one):
    trial = Trial([0, 1], CPU)
    steps = 2 * (1 + STEPS)
    turns = run(trial, lambda turn, step: 1.0 + (turn + (step - 1) // steps) % 2)
    assert len(turns) == MOST_ROUNDS * steps
