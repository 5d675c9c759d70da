"""Checks of residuals between four ranks: kept, restored, inherited and lost."""

import os

import pytest
import torch
import torch.distributed as dist

from dlrm.comm.build import Collectives
from dlrm.comm.collectives.collective import select_share
from dlrm.comm.compression.compressors import MSTopK
from dlrm.comm.config import COMPRESSORS
from dlrm.comm.controllers.controller import Fixed
from dlrm.comm.exchange import Exchange
from dlrm.comm.feedback import LostResiduals
from tests.system.comm.common import (
    CPU,
    PER_NODE,
    SIZE,
    assert_same_bits,
    build,
    drawn,
    of_all,
    residual_of,
    sum_of,
)


class InTurn:
    """A tuner that takes another collective in each step."""

    is_settled = True

    def __init__(self, collectives):
        self._collectives, self._step = collectives, 0

    @property
    def chosen(self):
        return self._collectives[self._step % len(self._collectives)]

    def choose(self, gradient):
        chosen = self.chosen
        self._step += 1
        return chosen

    def observe(self, step_s, exchange_s):
        pass

    def state_dict(self):
        return {"step": self._step}

    def load_state_dict(self, state):
        self._step = state["step"]


def collectives_in_turn():
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    make = Collectives("fp32", exact=True, device=CPU, group=None)
    names = (
        ("ring", "fp32"),
        ("all_gather", "fp32"),
        ("ring", "int8"),
        ("star", "fp32"),
        ("hi_topk", "fp32"),
    )
    return [make(*name) for name in names]


def exchange_in_turn(error_feedback):
    collectives = collectives_in_turn()
    tuner = InTurn(collectives)
    return Exchange(
        SIZE,
        collectives[0],
        MSTopK(),
        Fixed(0.1),
        dense=collectives[0],
        device=CPU,
        tuner=tuner,
        keeps_residual=error_feedback,
    )


def check_residuals_survive_changes_of_the_collective():
    """Lossless and lossy collectives in turn, with a NaN of one rank and restored states."""
    exchange, num_seen, place = exchange_in_turn(error_feedback=True), 0, 17
    others = torch.arange(SIZE) != place
    computed = sent = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(23):
        gradient = drawn(SIZE, step)
        if step == 8 and dist.get_rank() == 2:  # another rank selects in that step
            gradient[place] = float("nan")
        total = sum_of(exchange, gradient)
        assert_same_bits(total)
        num_seen += int(total[place].isnan())
        assert total[others].isfinite().all()
        computed, sent = computed + gradient, sent + total
        left = of_all(computed).sum(0) - sent - of_all(residual_of(exchange).double()).sum(0)
        assert float(left[others].abs().max()) < 1e-4, step
        if step % 5 == 0:  # a lossless ring sends all residuals
            assert not residual_of(exchange).any()
        if step in {11, 14}:
            state, residual = exchange.state_dict(), exchange.residual.state_dict()
            exchange = exchange_in_turn(error_feedback=True)
            exchange.load_state_dict(state)
            exchange.residual.load_state_dict(residual)
            assert exchange.settle() is None
    assert num_seen == 1
    assert residual_of(exchange).isfinite().all()


def check_steps_are_independent_without_error_feedback():
    exchange, by_hand = exchange_in_turn(error_feedback=False), collectives_in_turn()
    select = select_share(MSTopK(), round(0.1 * SIZE), SIZE)
    for step in range(13):
        gradient = drawn(SIZE, step)
        if step in {3, 6} and dist.get_rank() == 2:
            gradient[17] = float("nan")
        expected = by_hand[step % len(by_hand)].reduce(gradient.clone(), select)
        torch.testing.assert_close(sum_of(exchange, gradient), expected, rtol=0, atol=0, equal_nan=True)
        assert not exchange.residual.is_pending
        if step == 6:
            state, exchange = exchange.state_dict(), exchange_in_turn(error_feedback=False)
            exchange.load_state_dict(state)
            assert exchange.settle() is None
            exchange._tuner._collectives[3].load_state_dict(by_hand[3].state_dict())


def options_of(compressor):
    threshold = 0.5 if compressor == "threshold" else 0.0
    return {"exchange": "star", "compressor": compressor, "threshold": threshold, "ratio": 0.1}


def after_four_steps(**options):
    """An exchange with a residual, its state, and a copy of the residual's state."""
    made = build(**options)
    for step in range(4):
        sum_of(made, drawn(SIZE, step))
    residual = made.residual.state_dict()
    return (
        made,
        made.state_dict(),
        {**residual, "memory": {"residual": residual["memory"]["residual"].clone()}},
    )


def check_a_restored_residual_continues_bit_for_bit():
    for compressor in COMPRESSORS:
        made, state, residual = after_four_steps(**options_of(compressor))
        again = build(**options_of(compressor))
        again.load_state_dict(state)
        again.residual.load_state_dict(residual)
        assert again.settle() is None
        for step in range(4, 8):
            assert torch.equal(sum_of(again, drawn(SIZE, step)), sum_of(made, drawn(SIZE, step)))


def check_fewer_ranks_inherit_all_residuals():
    options = options_of("mstopk")
    _, state, residual = after_four_steps(**options)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, residual)
    heir, rank = build(**options), dist.get_rank()
    heir.load_state_dict(state)
    heir.residual.inherit(everybody[rank::2] if rank < 2 else [])
    assert heir.settle() is None
    taken = of_all(heir.residual.state_dict()["memory"]["residual"])
    torch.testing.assert_close(taken.sum(0), sum(each["memory"]["residual"] for each in everybody))
    assert not taken[2:].any()


def check_a_missing_residual_counts_as_lost():
    options = options_of("mstopk")
    _, state, residual = after_four_steps(**options)
    lossy = build(**options)
    lossy.load_state_dict(state)
    if dist.get_rank() != 3:
        lossy.residual.load_state_dict(residual)
    lost = lossy.settle()
    assert lost == LostResiduals(step=4, ranks=(3,), of_ranks=4, energy_share=lost.energy_share)
    # energies were measured before the second exchange
    first = build(**options)
    sum_of(first, drawn(SIZE, 0))
    energies = of_all(torch.tensor(first.residual.energy, dtype=torch.float64)).tolist()
    assert lost.energy_share == pytest.approx(energies[3] / sum(energies))
    assert lossy.losses == (lost,)
    sum_of(lossy, drawn(SIZE, 4))
    resumed = build(exchange="dense")
    resumed.load_state_dict(lossy.state_dict())
    assert resumed.settle().ranks == (0, 1, 2, 3)  # it keeps no residual
    assert len(resumed.losses) == 2


def check_a_lossless_exchange_sends_restored_residuals():
    _, state, residual = after_four_steps(**options_of("mstopk"))
    sending = build(exchange="ring")
    sending.load_state_dict(state)
    sending.residual.load_state_dict(residual)
    assert sending.settle() is None
    everything = of_all(residual["memory"]["residual"]).sum(0)
    torch.testing.assert_close(sum_of(sending, torch.zeros(SIZE)), everything)
    assert not sum_of(sending, torch.zeros(SIZE)).any()
