"""Compensation for late gradients, by the formulas of arXiv 2003.11666."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from dlrm.optim.delay import Compensation, spike_factors

LR = 0.1
LATE = (1, 2, 4, 16)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-14)


def stepped(weights, optimizer, gradients):
    """The weights after each update by the given gradients, `[n, size]`; None: there is no gradient."""
    after = []
    for gradient in gradients:
        weights.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        after.append(weights.detach().clone())
    return torch.stack(after)


def path(gradients, kind="none", delay_steps=0, start=None, **options):
    """The path of weights from `start` (zeros) under SGD with compensation."""
    start = torch.zeros(3, dtype=torch.float64) if start is None else start
    weights = nn.Parameter(start.clone())
    optimizer = SGD([weights], lr=LR, **{"momentum": 0.9, **options})
    Compensation(optimizer, kind, delay_steps)
    return stepped(weights, optimizer, gradients)


def drawn(num, seed=0):
    return [*torch.randn(num, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("delay_steps", LATE)
def test_a_late_impulse_displaces_the_weights_as_if_it_had_been_in_time(delay_steps):
    (impulse,) = drawn(1)
    none = [torch.zeros_like(impulse)]
    in_time = path([impulse, *none * 40])
    late = path(none * delay_steps + [impulse] + none * (40 - delay_steps), "spike", delay_steps)
    assert not late[:delay_steps].any()
    close(late[delay_steps:], in_time[delay_steps:])
    uncompensated = path(none * delay_steps + [impulse] + none * (40 - delay_steps))
    assert (uncompensated - in_time).abs()[delay_steps:].max() > 0.01


@given(st.integers(0, 9), st.floats(0.01, 0.99), st.integers(1, 9))
def test_spikes_of_any_late_gradients_add_up(delay_steps, momentum, num):
    gradients = drawn(num, seed=num)
    none = [torch.zeros(3, dtype=torch.float64)] * delay_steps
    in_time, late = [*gradients, *none], [*none, *gradients]
    expected = path(in_time, momentum=momentum)[-1]
    close(path(late, "spike", delay_steps, momentum=momentum)[-1], expected, atol=1e-12)


def test_the_spike_of_one_step_is_nesterovs_momentum():
    gradients = drawn(20)
    close(path(gradients, "spike", 1), path(gradients, nesterov=True))
    assert spike_factors(0.9, 0) == (1, 0)
    close(path(gradients, "spike", 0), path(gradients), atol=0)


def predictions(kind, delay_steps, **options):
    """Predicted weights before each update, and the path."""
    weights = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = SGD([weights], lr=LR, **{"momentum": 0.9, **options})
    compensation = Compensation(optimizer, kind, delay_steps)
    predicted, after = [], []
    for gradient in drawn(12):
        compensation.predict()
        predicted.append(weights.detach().clone())
        after.append(stepped(weights, optimizer, [gradient]))
    return torch.stack(predicted), torch.cat(after)


@given(st.integers(1, 16), st.floats(0.01, 0.99), st.sampled_from([0, 0.1]))
def test_both_predictions_are_the_same_without_spikes(delay_steps, momentum, weight_decay):
    options = {"momentum": momentum, "weight_decay": weight_decay}
    by_velocity, after = predictions("velocity", delay_steps, **options)
    by_weights, same = predictions("weights", delay_steps, **options)
    close(by_velocity, by_weights, atol=1e-12)
    assert torch.equal(after, same)
    # the formula, from the path itself
    start = torch.ones(1, 3, dtype=torch.float64)
    real = torch.cat([start, start, after])
    close(by_weights, real[1:-1] + delay_steps * (real[1:-1] - real[:-2]), atol=1e-12)


def test_with_spikes_the_predictions_differ_and_the_update_does_not():
    by_velocity, after = predictions("spike+velocity", 1)
    by_weights, same = predictions("spike+weights", 1)
    assert (by_velocity - by_weights).abs().max() > 0.01
    start = torch.ones(3, dtype=torch.float64)
    plain = path(drawn(12), "spike", 1, start=start)
    assert torch.equal(after, plain), "updates start from the real weights"
    assert torch.equal(same, plain)


@pytest.mark.parametrize("kind", ["spike", "velocity", "weights", "spike+weights"])
def test_without_a_gradient_neither_weights_nor_state_change(kind):
    weights = nn.Parameter(torch.ones(3))
    optimizer = SGD([weights], lr=LR, momentum=0.9)
    compensation = Compensation(optimizer, kind, 1)
    compensation.predict()
    stepped(weights, optimizer, [None, None])
    assert weights.tolist() == [1, 1, 1]
    assert not optimizer.state


@pytest.mark.parametrize("kind", ["velocity", "weights"])
def test_real_weights_come_back_bit_for_bit(kind):
    weights = nn.Parameter(torch.rand(1000))
    optimizer = SGD([weights], lr=LR, momentum=0.9)
    compensation = Compensation(optimizer, kind, 1)
    weights.grad = torch.rand(1000)
    optimizer.step()
    real = weights.detach().clone()
    for _ in range(2):  # the second time without an update, as when a step has failed
        compensation.predict()
        assert not torch.equal(weights, real)
    compensation.restore()
    assert torch.equal(weights, real)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"momentum": 0}, "velocity", r"give SGD momentum \(in a recipe dense.momentum=0.9\)"),
        ({"dampening": 0.1}, "spike", "leave SGD's dampening at 0"),
        ({"nesterov": True}, "velocity", "leave out nesterov and choose compensation spike"),
        ({"maximize": True}, "weights", "negate the loss"),
        ({"weight_decay": 0.1}, "spike+velocity", "set SGD's weight_decay to 0"),
    ],
)
def test_options_without_a_meaning_are_refused(options, kind, message):
    make = partial(SGD, [nn.Parameter(torch.ones(1))], **{"lr": 0.1, "momentum": 0.9, **options})
    with pytest.raises(ValueError, match=message):
        Compensation(make(), kind, 1)
    Compensation(make(), "none", 1)
