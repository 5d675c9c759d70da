"""Late dense gradients on one rank; between ranks, see tests/system/comm."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from cpr.checkpoint.state.model_state import to_host
from dlrm.config.schema import DenseConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.delayed import DelayedSync
from dlrm.optim.build import _dense_optimizer
from dlrm.optim.delay import Compensation
from dlrm.optim.norms import local_norms

LR, MOMENTUM, STEPS = 0.05, 0.9, 7
KINDS = ["none", "spike", "velocity", "weights", "spike+velocity", "spike+weights"]


class Run:
    """A small model that trains on a stream of batches, one of which is for each step."""

    def __init__(self, make_sync, kind="none", dense=None):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        parameters = list(self.model.parameters())
        dense = dense or DenseConfig(optimizer="sgd", momentum=MOMENTUM, learning_rate=LR)
        self.optimizer = _dense_optimizer(parameters, dense, local_norms)
        self.compensation = Compensation(self.optimizer, kind, 1) if kind != "none" else None
        self.sync = make_sync(parameters)
        self.steps_done = 0
        self.losses = []

    def train(self, steps):
        for _ in range(steps):
            inputs, targets = batch(self.steps_done)
            self.optimizer.zero_grad()
            if self.compensation:
                self.compensation.predict()
            loss = mse_loss(self.model(inputs), targets)
            loss.backward()
            (mean,) = self.sync.average(loss.detach().view(1)).tolist()
            assert mean == loss.item(), "scalars are not late"
            self.losses.append(mean)
            self.optimizer.step()
            self.sync.updated(0.1)
            self.steps_done += 1
        return self

    def states(self):
        own = self.sync.own.state_dict() if self.sync.own else None
        return to_host([self.model.state_dict(), self.optimizer.state_dict(), self.sync.state_dict(), own])

    def load(self, states, steps_done):
        model, optimizer, sync, own = to_host(states)  # optimizers keep the tensors that they load
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.sync.load_state_dict(sync, steps_done)
        if self.sync.own:
            self.sync.own.inherit([own] if own else [])
        self.lost = self.sync.settle()
        self.steps_done = steps_done
        return self

    @property
    def weights(self):
        return torch.cat([each.detach().view(-1) for each in self.model.parameters()])


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def simulated(kind, delay_steps, steps):
    """The weights after each step, by the formulas and nothing else; gradients wait in a list."""
    spike, _, prediction = kind.partition("+")
    if spike != "spike":
        spike, prediction = "", kind
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    parameters = list(model.parameters())
    weights = [each.detach().clone() for each in parameters]
    before, velocity, waiting, path = None, None, [], []
    for step in range(steps):
        forward = weights
        if prediction == "velocity" and velocity:
            forward = [w - LR * delay_steps * v for w, v in zip(weights, velocity, strict=True)]
        if prediction == "weights" and before:
            forward = [w + delay_steps * (w - b) for w, b in zip(weights, before, strict=True)]
        for parameter, value in zip(parameters, forward, strict=True):
            parameter.data = value.clone()
        inputs, targets = batch(step)
        waiting.append(torch.autograd.grad(mse_loss(model(inputs), targets), parameters))
        if len(waiting) > delay_steps:
            late = waiting.pop(0)
            velocity = [MOMENTUM * v + g for v, g in zip(velocity or [0] * len(late), late, strict=True)]
            a, b = (MOMENTUM, 1) if spike else (1, 0)
            before, weights = (
                weights,
                [w - LR * (a * v + b * g) for w, v, g in zip(weights, velocity, late, strict=True)],
            )
        path.append(torch.cat([each.view(-1) for each in weights]))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_run_equals_a_simulation(kind, world_of_one):
    run = Run(DelayedSync, kind)
    for expected in simulated(kind, 1, STEPS):
        torch.testing.assert_close(run.train(1).weights, expected, rtol=1e-6, atol=1e-7)
    assert run.sync.take_figures().steps == STEPS
    assert not torch.allclose(run.weights, simulated("none", 0, STEPS)[-1], atol=1e-3)


@pytest.mark.parametrize("delay_steps", [2, 3])
def test_longer_delays_equal_a_simulation(delay_steps, world_of_one):
    run = Run(partial(DelayedSync, delay_steps=delay_steps))
    for expected in simulated("none", delay_steps, STEPS):
        torch.testing.assert_close(run.train(1).weights, expected, rtol=1e-6, atol=1e-7)


def test_without_delay_a_run_equals_one_that_averages_in_each_step(world_of_one):
    late = Run(partial(DelayedSync, delay_steps=0)).train(STEPS)
    plain = Run(partial(AllReduceSync, num_scalars=1)).train(STEPS)
    assert torch.equal(late.weights, plain.weights)
    assert late.losses == plain.losses


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "lars", "lamb"])
def test_the_first_step_changes_neither_weights_nor_optimizer(optimizer, world_of_one):
    decay = {"weight_decay": 0.1} if optimizer in {"lars", "lamb"} else {}
    run = Run(DelayedSync, dense=DenseConfig(optimizer=optimizer, **decay))
    weights, state, *_ = run.states()
    run.train(1)
    after, state_after, _, own = run.states()
    assert str(state_after) == str(state)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert all(each.any() for each in own["gradients"])
    before = run.weights
    assert not torch.equal(run.train(1).weights, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_after_any_step_equals_one_that_goes_on(kind, world_of_one):
    whole = Run(DelayedSync, kind)
    saved = [whole.states()]
    for _ in range(STEPS):
        saved.append(whole.train(1).states())  # which waits for the gradient that is in flight
    for step, states in enumerate(saved[:-1]):
        resumed = Run(DelayedSync, kind).train(3).load(states, step).train(STEPS - step)
        assert str(resumed.states()) == str(saved[-1])
        assert torch.equal(resumed.weights, whole.weights), step
        assert resumed.losses[3:] == whole.losses[step:]


def test_reading_the_state_does_not_change_what_is_applied(world_of_one):
    read, unread = Run(DelayedSync), Run(DelayedSync)
    for _ in range(STEPS):
        read.train(1).states()
        read.sync.join()
        read.states()
    assert torch.equal(read.weights, unread.train(STEPS).weights)


@pytest.mark.parametrize(
    "make", [partial(AllReduceSync, num_scalars=1), partial(DelayedSync, delay_steps=0)], ids=["plain", "now"]
)
def test_a_gradient_that_a_resumed_run_does_not_apply_is_told_of(make, world_of_one, caplog):
    late = Run(DelayedSync).train(2).states()
    with caplog.at_level(logging.WARNING):
        Run(DelayedSync).load(late, 2)
        assert caplog.messages == []
        resumed = Run(make).load(late, 2)
    assert len(caplog.messages) == 1
    assert "to apply it, resume with the pipeline and the model of the saved run" in caplog.messages[0]
    plain = Run(partial(AllReduceSync, num_scalars=1)).load([*late[:2], {}, None], 2)
    assert torch.equal(resumed.train(2).weights, plain.train(2).weights)


def test_residuals_of_another_exchange_are_told_of(world_of_one, caplog):
    with caplog.at_level(logging.WARNING):
        Run(DelayedSync).sync.load_state_dict({"exchange": {"owners": 2}}, 9)
    assert len(caplog.messages) == 1
    assert "resume with comm.exchange=ring for some steps" in caplog.messages[0]


def test_a_lost_part_of_a_late_gradient_is_told_of(world_of_one):
    """As of a run of two ranks: the other one's part counts alone, or nothing is applied."""
    *_, sync, own = Run(DelayedSync).train(2).states()
    sync["late_gradients"]["owners"] = own["num_ranks"] = 2
    both = [own, {**own, "rank": 1, "gradients": [3 * each for each in own["gradients"]]}]
    for kept in (both, both[1:], []):
        run = Run(DelayedSync)
        run.sync.load_state_dict(sync, 2)
        run.sync.own.inherit(kept)
        lost = run.sync.settle()
        assert (lost and lost.ranks) == {2: None, 1: (0,), 0: (0, 1)}[len(kept)]
        assert run.sync.losses == (() if lost is None else (lost,))
        again = Run(DelayedSync)
        again.sync.load_state_dict(run.sync.state_dict(), 2)
        again.sync.own.inherit([run.sync.own.state_dict()])
        assert again.sync.settle() is None, "the second time, as when no step was done in between"
        assert again.sync.losses == run.sync.losses
        for each in (run, again):
            each.sync.average(torch.zeros(1))
            grads = [parameter.grad for parameter in each.model.parameters()]
            if kept:
                factor = {2: 2, 1: 3}[len(kept)]
                found = torch.cat([gradient.view(-1) for gradient in grads])
                torch.testing.assert_close(found, factor * own["gradients"][0])
            else:
                assert grads == [None] * 4


def test_parts_of_another_model_are_refused(world_of_one):
    _, _, sync, own = Run(DelayedSync).train(1).states()
    other = DelayedSync([nn.Parameter(torch.zeros(3))])
    other.load_state_dict(sync, 1)
    with pytest.raises(ValueError, match="gradient has 37 values and that of the model 3: another model"):
        other.own.inherit([own])
