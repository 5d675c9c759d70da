"""Residuals that are kept, restored, inherited, or lost."""

import logging
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam

from dlrm.comm.compression.compressors import MSTopK, RandomK, TopK
from dlrm.comm.config import CommConfig
from dlrm.comm.feedback import LostResiduals, Residual, StepCheck, find_lost, warn_of_momentum
from dlrm.optim import LARS

CPU = torch.device("cpu")


def make_residual(values, rank=0, num_ranks=1, compressor=None, keeps=True):
    residual = Residual(len(values), CPU, compressor or TopK(), rank, num_ranks, keeps=keeps)
    residual.add(torch.tensor(values))
    residual.is_pending = keeps
    return residual


def values_of(residual):
    return residual.state_dict()["memory"]["residual"].tolist()


def test_values_that_were_not_sent_are_added_to_the_next_gradient():
    residual, gradient = make_residual([0.0, 0.0, 0.0]), torch.tensor([1.0, -2.0, 3.0])
    vector = residual.add(gradient)
    vector[1] = 0  # sent
    assert residual.energy == pytest.approx(10)
    again = residual.add(torch.tensor([10.0, 20.0, float("nan")]))
    assert again[:2].tolist() == [11.0, 20.0]
    assert again.data_ptr() == vector.data_ptr(), "the residual was copied"
    assert gradient.tolist() == [1.0, -2.0, 3.0]
    assert residual.add(torch.ones(3))[2].isnan()  # until it is sent
    assert residual.energy != residual.energy


def test_without_error_feedback_values_are_forgotten_and_no_residual_is_saved():
    residual = make_residual([1.0, -2.0], keeps=False)
    assert residual.add(torch.tensor([10.0, 20.0])).tolist() == [10.0, 20.0]
    assert residual.energy == 0
    assert not residual.needs_saving
    assert residual.state_dict()["memory"] == {}
    residual.inherit([make_residual([1.0, 2.0], keeps=False).state_dict()])
    with pytest.raises(ValueError, match="would lose gradients"):
        residual.inherit([make_residual([1.0, 2.0]).state_dict()])


def test_energies_add_up_in_double_precision():
    """1 and 10,000,000 times (1e-4)^2: added one by one in fp32, the small ones would vanish."""
    residual, gradient = make_residual([0.0] * 10_000_001), torch.full((10_000_001,), 1e-4)
    gradient[0] = 1
    residual.add(gradient)
    assert residual.energy == pytest.approx(1 + 0.1, rel=1e-6)


def test_inherited_residuals_are_added_up_and_replace_the_current_one():
    residual = make_residual([100.0, 100.0], rank=1, num_ranks=2)
    residual.inherit(
        [make_residual([1.0, 2.0], 1, 3).state_dict(), make_residual([0.5, -2.0], 2, 3).state_dict()]
    )
    residual.is_pending = True
    assert values_of(residual) == [1.5, 0.0]
    assert residual.inherited == [(3, 1), (3, 2)]
    residual.inherit([])
    assert residual.energy == 0
    assert residual.inherited == []
    assert not residual.is_pending
    with pytest.raises(ValueError, match="another model"):
        residual.inherit([make_residual([1.0]).state_dict()])


def test_no_residual_is_saved_unless_one_is_pending():
    residual = make_residual([1.0])
    residual.is_pending = False
    state = residual.state_dict()
    assert state["memory"] == {}
    other = make_residual([3.0])
    other.inherit([state])
    assert other.energy == 0
    assert other.inherited == []


@pytest.mark.parametrize("keeps", [True, False])
def test_only_the_same_rank_of_as_many_continues_its_random_draws(keeps):
    vector, drawing = torch.zeros(50), RandomK(7)
    for _ in range(2):
        drawing.select(vector, 5)
    saved = make_residual([1.0], 1, 4, drawing, keeps=keeps)
    assert saved.needs_saving
    state, third = saved.state_dict(), drawing.select(vector, 5)
    same, other = RandomK(7), RandomK(7)
    make_residual([1.0], 1, 4, same, keeps=keeps).inherit([state])
    make_residual([1.0], 0, 4, other, keeps=keeps).inherit([state])
    assert torch.equal(same.select(vector, 5), third)
    assert torch.equal(other.select(vector, 5), RandomK(7).select(vector, 5))
    make_residual([1.0], 1, 4, TopK(), keeps=keeps).inherit([state])  # another compressor's is ignored


def test_a_missing_residual_is_lost_with_its_share_of_energy():
    lost = find_lost(3, [1.0, 2.0, 5.0], [[(3, 0)], [], [(3, 1)]], step=40)
    assert lost == LostResiduals(step=40, ranks=(2,), of_ranks=3, energy_share=5 / 8)
    assert "step 40, gradients that rank 2 of 3 had not sent yet: 62.5% of the energy" in str(lost)
    unknown = find_lost(2, [], [[], [(2, 1)]], step=1)
    assert (unknown.ranks, unknown.energy_share) == ((0,), None)
    of_fewer = find_lost(4, [1.0, 2.0], [[(4, 0)], [(4, 1)], [(4, 2)], []], step=1)
    assert (of_fewer.ranks, of_fewer.energy_share) == ((3,), None)
    of_more = find_lost(1, [1.0, 2.0], [[]], step=1)
    assert (of_more.ranks, of_more.energy_share) == ((0,), None)
    assert "an unknown share" in str(unknown)
    assert LostResiduals.from_dict({**vars(lost), "ranks": [2]}) == lost
    assert find_lost(0, [], [[], []], step=0) is None


@given(st.integers(1, 9), st.integers(1, 9))
def test_nothing_is_lost_when_the_number_of_ranks_changes(before, now):
    """Checkpoints give a state to the rank of the same number, modulo the number of ranks."""
    held = [[(before, rank) for rank in range(new, before, now)] for new in range(now)]
    assert find_lost(before, [1.0] * before, held, step=5) is None


RANDOM = CommConfig(exchange="all_gather", compressor="random")


class Pending:
    is_pending = True


def loss_after(steps, compressor, share, **options):
    """The loss of a linear regression with error feedback, about 100 at the start."""
    generator = torch.Generator().manual_seed(0)
    target, weights = torch.randn(100, generator=generator), torch.zeros(100)
    vector, optimizer = torch.zeros(100), SGD([weights], **options)
    for _ in range(steps):
        inputs = torch.randn(200, 100, generator=generator)
        vector += inputs.T @ (inputs @ (weights - target)) / 200
        sent = compressor.select(vector, int(100 * share))
        weights.grad = torch.zeros(100).index_copy(0, sent, vector[sent])
        vector[sent] = 0
        optimizer.step()
    return float((weights - target).square().sum())


def test_random_k_diverges_with_momentum_and_not_with_the_advice_of_the_warning():
    begin = loss_after(0, RandomK(0), 0.02, lr=0.01)
    assert loss_after(1000, RandomK(0), 0.02, lr=0.01, momentum=0.9) > 1e6 * begin
    assert loss_after(1000, RandomK(0), 1.0, lr=0.01, momentum=0.9) < 0.01 * begin
    assert loss_after(1000, MSTopK(), 0.02, lr=0.01, momentum=0.9) < 0.01 * begin
    assert loss_after(1000, RandomK(0), 0.02, lr=0.01) < 0.01 * begin
    assert loss_after(1000, RandomK(0), 0.02, lr=0.001, momentum=0.9) < 0.01 * begin


@pytest.mark.parametrize(
    ("config", "make", "warns"),
    [
        (RANDOM, lambda each: SGD(each, lr=1, momentum=0.8), True),
        (RANDOM, lambda each: LARS(each, lr=1, momentum=0.8), True),
        (RANDOM, lambda each: SGD(each, lr=1), False),
        (RANDOM, Adam, False),
        (CommConfig(exchange="all_gather"), lambda each: SGD(each, lr=1, momentum=0.8), False),
        (
            CommConfig(exchange="star", compressor="random", error_feedback=False),
            lambda each: SGD(each, lr=1, momentum=0.8),
            False,
        ),
    ],
)
def test_momentum_under_random_k_causes_a_warning(caplog, config, make, warns):
    with caplog.at_level(logging.WARNING):
        warn_of_momentum(config, make([nn.Parameter(torch.ones(1))]))
    assert ["with momentum 0.8 may diverge" in record.message for record in caplog.records] == [True] * warns
    assert all("multiply the learning rate by 0.2" in record.message for record in caplog.records)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("enabled", "is_exchanged", "raises"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_an_enabled_scaler_is_refused_before_the_update(fused, enabled, is_exchanged, raises):
    weight = nn.Parameter(torch.ones(2))
    check = StepCheck(RANDOM, {id(weight) if is_exchanged else 0}, Pending(), warns=True)
    optimizer, scaler = SGD([weight], lr=1.0, fused=fused), GradScaler("cpu", enabled=enabled)
    optimizer.register_step_pre_hook(check)
    scaler.scale(weight.sum()).backward()
    with (
        pytest.raises(RuntimeError, match=r"a GradScaler scales .* bf16 without") if raises else nullcontext()
    ):
        scaler.step(optimizer)
    assert weight.tolist() == ([1, 1] if raises else [0, 0])


def test_the_warning_comes_once_when_a_residual_is_pending(caplog):
    weight, residual = nn.Parameter(torch.ones(2)), Pending()
    optimizer = SGD([weight], lr=1.0, momentum=0.9)
    optimizer.register_step_pre_hook(StepCheck(RANDOM, {id(weight)}, residual, warns=True))
    said = []
    for residual.is_pending in (False, True, True):
        optimizer.step()
        said.append(len(caplog.records))
    assert said == [0, 1, 1]
