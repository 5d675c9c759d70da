"""GraVAC tries higher factors while they pay, stays dense if none does, and decides alike on all ranks."""

import math
from itertools import groupby

import pytest
import torch

from dlrm.comm.compression.compressors import TopK
from dlrm.comm.controllers.gravac import GraVAC
from tests.dlrm.comm.controllers.groups import Alone, together
from tests.dlrm.comm.controllers.playing import NUM_VALUES, Play, even, slow_link, uneven

WINDOW = 30
SETTLING = 6 * WINDOW
"""Steps in which all factors, of which there are six here, have been tried."""


def make(agree=None, **changes):
    return GraVAC(**{"agree": agree or Alone(), "window_steps": WINDOW, **changes})


def cut(factor):
    return round(NUM_VALUES / factor)


def test_factors_are_tried_upwards_a_window_each():
    sent = Play(make(min_gain=0.01), seconds=lambda ratio: ratio).steps(SETTLING)
    assert [value for value, _ in groupby(sent)] == [NUM_VALUES, *map(cut, (10, 20, 40, 160, 1000))]
    assert [len(list(same)) for _, same in groupby(sent)] == [WINDOW] * 6


def test_a_first_factor_that_is_slower_than_dense_does_not_end_the_search():
    """A sparse all-gather of many ranks: slower than dense at a tenth, much faster at a hundredth."""
    play = Play(
        make(min_gain=0.5),
        seconds=lambda ratio: 1.0 if ratio == 1 else 0.2 + 10 * ratio,
        remembers=False,
    )
    assert play.steps(SETTLING + 1)[-1] in {cut(40), cut(160)}


@pytest.mark.parametrize("min_gain", [0.1, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("base_s", [0.01, 0.1, 1.0, 10.0])
def test_settles_on_the_factor_with_the_highest_throughput(base_s, min_gain):
    """Among factors that keep enough energy."""
    play = Play(make(min_gain=min_gain), lambda ratio: base_s + ratio, remembers=False)
    settled = play.steps(SETTLING + 1)[-1]
    worth = {NUM_VALUES: 1 / (base_s + 1)}
    vectors = [uneven(step) for step in range(WINDOW)]
    for factor in (10, 20, 40, 160, 1000):
        kept = [vector.abs().topk(cut(factor)).values for vector in vectors]
        gain = sum(each.square().sum() for each in kept) / sum(each.square().sum() for each in vectors)
        if gain >= min_gain:
            worth[cut(factor)] = float(gain) / (base_s + 1 / factor)
    assert worth[settled] >= 0.95 * max(worth.values()), (settled, worth)


def test_no_step_sends_less_than_the_least_gain_allows():
    assert set(Play(make(min_gain=0.7), slow_link, gradient=even).steps(2 * SETTLING)) == {NUM_VALUES}


def test_a_factor_that_loses_too_much_falls_back_to_the_floor():
    """And is the last one tried, as it was not good enough in its own window."""
    controller = make(lowest_factor=4, policy="geometric", min_gain=0.9, tolerance=0)
    play = Play(controller, slow_link, remembers=False)
    assert [values for values, _ in groupby(play.steps(SETTLING + 1))] == [
        NUM_VALUES,
        *map(cut, (4, 8, 16, 32)),
        cut(4),  # in the window of 64
        cut(32),
    ]
    assert min(play.gains) > 0.85  # smoothed, it is above 0.9


def test_the_floor_empties_the_residual_now_and_then():
    play = Play(make(lowest_factor=4, highest_factor=2000, min_gain=0.9), slow_link)
    sent = play.steps(20 * WINDOW)
    kept = [gain for gain, number in zip(play.gains, sent, strict=True) if number < NUM_VALUES]
    assert len(kept) > 10 * WINDOW
    assert sum(kept) / len(kept) >= 0.9


def test_the_floor_rises_where_nothing_is_lost_by_it():
    def few_values(step):
        gradient = torch.zeros(NUM_VALUES)
        gradient[(7 * step) % NUM_VALUES] = 1.0
        return gradient

    controller = make()
    Play(controller, slow_link, gradient=few_values).steps(SETTLING + 1)
    state = controller.state_dict()
    assert state["factor"] == state["floor"] == 1000


def test_the_second_level_selects_what_one_level_would():
    controller = make(min_gain=0.01)
    Play(controller, lambda ratio: ratio).steps(4 * WINDOW)
    vector = uneven(step=77)
    choice = controller.choose(vector, TopK())
    assert choice.num_kept == cut(160)
    direct = TopK().select(vector, choice.num_kept)
    assert sorted(choice.indices.tolist()) == sorted(direct.tolist())


def test_a_nan_gradient_is_sent_whole_by_all_ranks_and_not_learned():
    controller = make(min_gain=0.3)
    play = Play(controller, slow_link)
    play.steps(SETTLING + 1)
    settled = play.sent[-1]
    assert settled < NUM_VALUES
    before = controller.state_dict()
    broken = uneven(step=0)
    broken[5] = math.nan
    assert controller.choose(broken, TopK()).num_kept == NUM_VALUES
    assert controller.state_dict() == before
    assert controller.choose(uneven(step=1), TopK()).num_kept == settled

    def work(member):
        controller = make(member, min_gain=0.3)
        Play(controller, slow_link).steps(SETTLING + 1)
        return controller.choose(broken if member.rank else uneven(step=0), TopK()).num_kept

    assert together(2, work) == [NUM_VALUES, NUM_VALUES]


def test_one_slow_step_does_not_change_the_decision():
    times = iter(range(10**6))
    play = Play(make(min_gain=0.3), lambda ratio: 50.0 if next(times) % WINDOW == 7 else 0.1 + ratio)
    calm = Play(make(min_gain=0.3), slow_link)
    assert play.steps(SETTLING + WINDOW) == calm.steps(SETTLING + WINDOW)


def test_searches_again_after_four_windows_then_after_eight():
    """Settling takes 3 windows here: dense, the first factor, and the second, which is no better."""
    sent = Play(make(min_gain=0.01), seconds=lambda ratio: 1 - 0.9 * (ratio < 1)).steps(24 * WINDOW)
    tried = [sent[window * WINDOW] == NUM_VALUES for window in range(24)]
    assert [window for window, dense in enumerate(tried) if dense] == [0, 7, 18]
