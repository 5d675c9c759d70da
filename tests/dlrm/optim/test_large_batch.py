"""LARS and LAMB against their formulas, evaluated in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from dlrm.optim import LAMB, LARS

SHAPES = {"weight": (7, 5), "bias": (7,), "deep": (3, 2, 2), "zeros": (4, 4), "without gradient": (2, 2)}
STEPS = 12


def make_parameters():
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]
    parameters[3].data.zero_()
    return parameters


def make_gradients(step):
    """Gradients of all parameters but the last; every fourth step, one is all 0."""
    generator = torch.Generator().manual_seed(100 + step)
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    gradients[0] *= 1.0 - (step % 4 == 2)
    return [*gradients[:-1], None]


def lars_by_the_formula(weight, gradients, *, lr, trust, momentum, decay):
    w = weight.detach().double()
    v = torch.zeros_like(w)
    beta = decay if w.dim() > 1 else 0.0
    for gradient in gradients:
        g = gradient.double()
        w_norm, g_norm = w.pow(2).sum().sqrt().item(), g.pow(2).sum().sqrt().item()
        rate = trust * w_norm / (g_norm + beta * w_norm) if w_norm > 0 and g_norm > 0 else trust
        v = momentum * v + lr * rate * (g + beta * w)
        w = w - v
    return w


def lamb_by_the_formula(weight, gradients, *, lr, betas, eps, decay):
    w = weight.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    beta = decay if w.dim() > 1 else 0.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + beta * w
        w_norm, u_norm = math.sqrt((w**2).sum()), math.sqrt((u**2).sum())
        w = w - lr * (w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0) * u
    return w


def train(make):
    parameters = make_parameters()
    optimizer = make(parameters)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, make_gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters


CASES = [
    (
        lambda decay: (
            lambda parameters: LARS(
                parameters, lr=2.0, momentum=0.9, weight_decay=decay, trust_coefficient=0.01
            )
        ),
        lambda decay: {"lr": 2.0, "trust": 0.01, "momentum": 0.9, "decay": decay},
        lars_by_the_formula,
    ),
    (
        lambda decay: lambda parameters: LAMB(parameters, lr=0.02, weight_decay=decay),
        lambda decay: {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-6, "decay": decay},
        lamb_by_the_formula,
    ),
]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("make", "options", "formula"), CASES, ids=["lars", "lamb"])
def test_steps_follow_the_formula(make, options, formula, decay):
    trained = train(make(decay))
    of_steps = [make_gradients(step) for step in range(STEPS)]
    for index, start in enumerate(make_parameters()[:-1]):
        expected = formula(start, [each[index] for each in of_steps], **options(decay))
        torch.testing.assert_close(trained[index].detach().double(), expected, rtol=2e-5, atol=2e-6)
        assert not torch.equal(trained[index], start)
    assert torch.equal(trained[-1], make_parameters()[-1])  # it never had a gradient


@pytest.mark.parametrize("make", [case[0](0.1) for case in CASES], ids=["lars", "lamb"])
def test_a_restored_state_continues_bit_for_bit(make):
    parameters = make_parameters()
    optimizer = make(parameters)
    for step in range(STEPS):
        if step == STEPS // 2:
            state = copy.deepcopy(optimizer.state_dict())
            parameters = [nn.Parameter(each.detach().clone()) for each in parameters]
            optimizer = make(parameters)
            optimizer.load_state_dict(state)
        for parameter, gradient in zip(parameters, make_gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for mine, other in zip(parameters, train(make), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("make", [LARS, LAMB])
@pytest.mark.parametrize(("start", "gradient", "end"), [(0.0, 0.0, 0.0), (1.0, math.nan, math.nan)])
def test_zeros_stay_zeros_and_nan_reaches_the_weights(make, start, gradient, end):
    weight = nn.Parameter(torch.full((3, 3), start))
    weight.grad = torch.full((3, 3), gradient)
    make([weight], lr=1.0, weight_decay=0.1).step()
    assert torch.equal(weight.nan_to_num(7.0), torch.full((3, 3), end).nan_to_num(7.0))
