"""Optimizers that do not suit delayed gradients."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam

from dlrm.comm.compression.compressors import MSTopK, RandomK
from dlrm.comm.config import CommConfig
from dlrm.comm.feedback.step_check import StepCheck, warn_of_momentum
from dlrm.optim import LARS

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
