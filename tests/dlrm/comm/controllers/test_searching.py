"""What GraVAC and Pareto, which search the share to send by trying, have in common."""

import json
import math

import pytest
import torch

from dlrm.comm.compression.compressors import TopK
from dlrm.comm.controllers.gravac import GraVAC
from dlrm.comm.controllers.pareto import Pareto
from tests.dlrm.comm.controllers.groups import Alone, together
from tests.dlrm.comm.controllers.playing import NUM_VALUES, Play, even, slow_link, uneven

SEARCHING = 180
"""Steps in which both have tried all shares."""


def gravac(agree=None):
    return GraVAC(agree=agree or Alone(), window_steps=30, min_gain=0.3)


def pareto(agree=None):
    return Pareto(agree=agree or Alone(), sample_steps=5, rest_steps=20)


BOTH = pytest.mark.parametrize("make", [gravac, pareto])


@BOTH
@pytest.mark.parametrize("seconds", [lambda ratio: 1.0, lambda ratio: 1.0 + 0.2 * (ratio < 1)])
def test_stays_dense_when_the_exchange_is_not_what_takes_time(make, seconds):
    play = Play(make(), seconds)
    play.steps(90)
    asked = play.compressor.calls
    assert play.steps(100) == [NUM_VALUES] * 100
    assert play.compressor.calls == asked, "a dense gradient need not be compressed"


@BOTH
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_gradients_without_energy_stay_dense_where_compression_gains_nothing(make, value):
    play = Play(make(), lambda ratio: 1.0, gradient=lambda step: torch.full((NUM_VALUES,), value))
    play.steps(SEARCHING)
    assert set(play.steps(60)) == {NUM_VALUES}


@BOTH
def test_without_observed_steps_training_stays_dense(make):
    play = Play(make(), slow_link)
    play.controller.observe = lambda seconds: None
    play.steps(SEARCHING)
    assert set(play.steps(60)) == {NUM_VALUES}


@BOTH
def test_ranks_with_other_gradients_and_clocks_choose_alike(make):
    """On its own, each rank would choose otherwise: compression pays on the first, and not on the last."""

    def work(member):
        controller = make(member)
        play = Play(
            controller,
            seconds=lambda ratio: slow_link(ratio) * (1 + member.rank) + 0.01 * torch.rand(1).item(),
            gradient=lambda step: (uneven if member.rank < 2 else even)(step, rank=member.rank),
        )
        play.steps(2 * SEARCHING)
        return play.sent, controller.state_dict()

    (first, state), *others = together(3, work)
    assert all(other == (first, state) for other in others)
    assert len(set(first)) > 2


@BOTH
def test_steps_without_a_choice_are_ignored(make):
    """As while the tuner tries another collective."""
    play, alike = (Play(make(), slow_link) for _ in range(2))
    for _ in range(SEARCHING + 1):
        assert play.steps(1) == alike.steps(1)
        play.controller.observe(1e6)
        play.controller.observe(1e-6)


@BOTH
@pytest.mark.parametrize("stop", [30, 90, 210])
def test_a_restored_state_continues_unchanged(make, stop):
    play, resumed = Play(make(), slow_link), Play(make(), slow_link)
    play.steps(stop)
    resumed.controller.load_state_dict(json.loads(json.dumps(play.controller.state_dict())))
    play.controller.load_state_dict(play.controller.state_dict())  # both start the window over
    resumed.residual, resumed.sent[:] = play.residual, play.sent
    assert resumed.steps(SEARCHING) == play.steps(SEARCHING)
    assert resumed.controller.state_dict() == play.controller.state_dict()


@BOTH
def test_searches_again_when_a_link_has_become_slow(make):
    link = {"s": 0.0}
    play = Play(make(), lambda ratio: 0.1 + link["s"] * ratio)
    assert play.steps(SEARCHING)[-1] == NUM_VALUES
    link["s"] = 1.0
    assert play.steps(SEARCHING + 60)[-1] < NUM_VALUES


@BOTH
def test_starts_over_with_another_number_of_ranks(make):
    play = Play(make(), slow_link)
    play.steps(SEARCHING + 1)
    other, new = make(Alone(num_ranks=2)), make(Alone(num_ranks=2))
    other.load_state_dict(play.controller.state_dict())
    assert other.state_dict() == new.state_dict()
    assert other.choose(uneven(step=0), TopK()).num_kept == NUM_VALUES
