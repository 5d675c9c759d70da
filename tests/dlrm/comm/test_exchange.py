"""An exchange of one rank; of several ranks, see tests/system/comm."""

import pytest
import torch

from dlrm.comm.build import build_exchange
from dlrm.comm.collectives.dense_sums import Ring
from dlrm.comm.compression.compressors import TopK
from dlrm.comm.compression.wire_codecs import Cast
from dlrm.comm.config import CONTROLLERS, EXCHANGES, PLAIN, CommConfig
from dlrm.comm.controllers.controller import Fixed
from dlrm.comm.exchange import Exchange
from tests.system.comm.common import sum_of

CPU = torch.device("cpu")
SUMMING = [name for name in EXCHANGES if name not in PLAIN or name == "dense"]


@pytest.mark.parametrize("exchange", SUMMING)
def test_a_single_rank_keeps_its_gradient_and_has_no_residual(exchange, world_of_one):
    made = build_exchange(CommConfig(exchange=exchange), 50, CPU)
    for step in range(12):  # `auto` has no candidates here
        gradient = torch.randn(50)
        before = gradient.clone()
        assert torch.equal(sum_of(made, gradient), before)
        assert torch.equal(gradient, before)
        made.observe(0.01)
        assert made.steps_done == step + 1
    assert not made.residual.is_pending
    assert made.settle() is None


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_residuals_of_removed_ranks_are_added_to_the_next_gradient(controller, world_of_one):
    made = build_exchange(CommConfig(exchange="all_gather", controller=controller), 4, CPU)
    state = {
        "rank": 0,
        "num_ranks": 2,
        "memory": {"residual": torch.tensor([1.0, 0, 0, 2])},
        "compressor": {},
    }
    other = {**state, "rank": 1}
    made.load_state_dict({**made.state_dict(), "steps_done": 9, "owners": 2})
    made.residual.inherit([state, other])
    assert made.settle() is None
    assert sum_of(made, torch.ones(4)).tolist() == [3, 1, 1, 5]
    assert sum_of(made, torch.ones(4)).tolist() == [1, 1, 1, 1]
    assert made.steps_done == 11
    assert made.losses == ()


def test_a_gradient_of_another_model_is_refused(world_of_one):
    for exchange in ("dense", "all_gather"):
        made = build_exchange(CommConfig(exchange=exchange), 4, CPU)
        with pytest.raises(ValueError, match=r"float32 of 5 values, .* is for fp32 of 4 in one"):
            sum_of(made, torch.ones(5))
        with pytest.raises(ValueError, match="float64 of 4 values"):
            sum_of(made, torch.ones(4, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"2 values, .* of 4 in one"):
            made.combine(torch.ones(4))  # without places for error flags
        with pytest.raises(KeyError, match="mine"):
            made.combine(made.make_buffer(), problem=KeyError("mine"))
        assert sum_of(made, torch.ones(4)).tolist() == [1, 1, 1, 1]
        assert made.steps_done == 1


def test_figures_are_means_since_they_were_last_taken(world_of_one):
    made = build_exchange(CommConfig(exchange="ring"), 100, CPU)
    assert made.take_figures() is None
    for seconds in (1.0, 3.0):
        sum_of(made, torch.ones(100))
        made.observe(seconds)
    figures = made.take_figures()
    assert (figures.name, figures.steps, figures.step_seconds) == ("ring fp32", 2, 2.0)
    assert figures.kept_share == 1.0
    assert figures.sent_bytes == 0  # there is no other rank
    assert figures.residual_energy is None
    assert 0 < figures.seconds < 1
    assert figures.share == figures.seconds / 2
    assert made.take_figures() is None


def test_energies_of_other_ranks_weigh_losses_and_are_dropped(world_of_one):
    made = build_exchange(CommConfig(exchange="star"), 4, CPU)
    made.load_state_dict({**made.state_dict(), "steps_done": 9, "owners": 2, "energies": [1.0, 3.0]})
    made.residual.inherit(
        [{"rank": 0, "num_ranks": 2, "memory": {"residual": torch.ones(4)}, "compressor": {}}]
    )
    lost = made.settle()
    assert (lost.ranks, lost.of_ranks, lost.energy_share) == ((1,), 2, 0.75)
    assert made.state_dict()["energies"] == []
    assert made.state_dict()["owners"] == 1


def test_a_failed_rank_gives_the_tuner_zeros_of_the_right_length(world_of_one):
    shapes = []

    class Timing:
        chosen = None

        def choose(self, gradient):
            shapes.append(gradient.shape)

    ring = Ring(Cast(torch.float32))
    exchange = Exchange(4, ring, TopK(), Fixed(0.5), dense=ring, device=CPU, tuner=Timing())
    for wrong in (torch.ones(3), torch.ones(5)):
        with pytest.raises(ValueError, match="this exchange is for fp32 of 4"):
            sum_of(exchange, wrong)
        with pytest.raises(ValueError, match="this exchange is for fp32 of 4"):
            exchange.combine(torch.ones(wrong.numel() + 2))
    assert shapes == [(4,)] * 4


def test_parts_of_another_kind_start_over(world_of_one):
    by_gravac = build_exchange(CommConfig(exchange="star", controller="gravac"), 9, CPU)
    sum_of(by_gravac, torch.ones(9))
    fixed = build_exchange(CommConfig(exchange="all_gather"), 9, CPU)
    fixed.load_state_dict(by_gravac.state_dict())
    assert fixed.steps_done == 1
    assert set(by_gravac.state_dict()["parts"]) == {"GraVAC", "ARTopK"}


def test_a_controller_that_is_not_used_observes_nothing(world_of_one):
    class Told(Fixed):
        seconds = ()

        def observe(self, seconds):
            self.seconds += (seconds,)

    controller = Told(0.5)
    ring = Ring(Cast(torch.float32))
    made = Exchange(4, ring, TopK(), controller, dense=ring, device=CPU)
    sum_of(made, torch.ones(4))
    made.observe(1.0)
    assert controller.seconds == ()
