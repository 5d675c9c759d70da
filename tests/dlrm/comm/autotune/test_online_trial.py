"""Candidates take turns in the steps of a run."""

import random

import pytest
import torch

from dlrm.comm.autotune import online_trial as module
from dlrm.comm.autotune.online_trial import LEAST_ROUNDS, PAUSE_S, STEPS, OnlineTrial, running, typical

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
