"""Per-rank state after a change of the world size, and refusal of other models."""

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from cpr.checkpoint.state.changes import Changes
from cpr.checkpoint.state.model_state import ModelState, to_host
from cpr.checkpoint.state.optimizer_state import OptimizerState
from cpr.errors import MismatchError


class Plain:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


class Sum:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def inherit(self, states):
        self.value = sum(states)


@pytest.mark.parametrize(
    ("own", "gone", "plain", "total"),
    [
        ({"plain": 1, "sum": 10}, [], 1, 10),
        ({"plain": 1, "sum": 10}, [{"plain": 2, "sum": 20}], 1, 30),
        (None, [{"plain": 2, "sum": 20}, {}, {"sum": 5}], 7, 25),
        (None, [], 7, 0),  # other ranks load all of it: nothing is left of the state before
        ({}, [], 7, 0),
    ],
)
def test_per_rank_state_after_a_change_of_the_world_size(own, gone, plain, total):
    model = nn.Linear(1, 1)
    state = ModelState(model)
    first, second = Plain(7), Sum(70)
    state.register("plain", first, per_rank=True)
    assert not state.has_heirs
    state.register("sum", second, per_rank=True)
    assert state.has_heirs
    assert state.own() == {"plain": 7, "sum": 70}
    common = state.common(3)
    assert state.apply(common, own, gone) == 3
    assert (first.value, second.value) == (plain, total)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (nn.Linear(2, 1), r"weight is torch.float32 \[1, 1\] in the model and torch.float32 \[1, 2\]"),
        (nn.Linear(1, 1).to(torch.float64), r"\[1, 1\] in the model and torch.float64 \[1, 1\]"),
        (nn.Linear(1, 1, bias=False), "only the model has 'bias'"),
    ],
)
def test_dense_parameters_of_another_model_are_refused(other, difference):
    """Of another data type, too: to cast them would change values and say nothing, as for tables."""
    saved = ModelState(other).common(3)
    with pytest.raises(MismatchError, match=difference):
        ModelState(nn.Linear(1, 1)).check(saved)


def layers(width, extra=False):
    return nn.Sequential(
        nn.Linear(width, 3), *([nn.Linear(3, 3, bias=False)] if extra else []), nn.Linear(3, 1)
    )


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def keyed(model):
    parameters = dict(model.named_parameters())
    wrapped = KeyedOptimizerWrapper(parameters, lambda them: torch.optim.Adam(them, lr=0.1))
    return CombinedOptimizer([("dense", wrapped)])


def trained(width, make):
    """A model, its optimizer after two steps, and the state of both."""
    model = layers(width)
    optimizer = make(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, width)).sum().backward()
        optimizer.step()
    state = ModelState(model)
    state.register("optimizer", OptimizerState(optimizer), per_rank=False)
    return model, optimizer, state


def states_of(model, optimizer):
    """By name of the parameter."""
    inner = optimizer.optimizers[0][1] if isinstance(optimizer, CombinedOptimizer) else optimizer
    return {name: inner.state.get(each) for name, each in model.named_parameters()}


@pytest.mark.parametrize("make", [adagrad, adam, keyed])
def test_a_tensor_of_another_shape_starts_anew_with_its_optimizer_state(make):
    old, old_optimizer, saved = trained(2, make)
    common = saved.common(2)
    model = layers(5)
    optimizer = make(model)
    state = ModelState(model)
    state.register("optimizer", OptimizerState(optimizer), per_rank=False)
    with pytest.raises(MismatchError, match=r"differ: reset:0.weight .*0.weight is .*\[3, 5\] in "):
        state.check(common)
    changes = Changes.of("reset:0.weight")
    state.check(common, changes=changes)
    first = model[0].weight.detach().clone()
    before = states_of(model, optimizer)["0.weight"]
    before = {name: each.clone() for name, each in (before or {}).items()}
    state.apply(common, None, (), changes, state.fresh_tensors(state.differences(common)))
    assert torch.equal(model[0].weight, first)
    assert torch.equal(model[1].weight, old[1].weight)
    theirs, ours = states_of(old, old_optimizer), states_of(model, optimizer)
    assert {name: each.tolist() for name, each in (ours.pop("0.weight") or {}).items()} == {
        name: each.tolist() for name, each in before.items()
    }
    for name, mine in ours.items():
        assert mine.keys() == theirs[name].keys()
        assert all(torch.equal(mine[key], theirs[name][key]) for key in mine), name
    optimizer.zero_grad()
    model(torch.rand(4, 5)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [adagrad, adam, keyed])
def test_a_tensor_of_equal_shape_starts_anew_in_a_warm_start_if_it_is_named(make):
    """Not when a worker restarts, which says the same words again."""
    common = trained(2, make)[2].common(2)
    model, optimizer, state = trained(2, make)
    changes = Changes.of("reset:0.*", "reset:1.bias", "reset:optimizer", "reset:typo")
    assert [each.name for each in state.asked_for(common, None, changes)] == ["optimizer"]
    found = state.asked_for(common, [], changes)
    assert [each.name for each in found] == ["0.weight", "0.bias", "1.bias"]
    assert changes.unneeded([*found, *state.asked_for(common, ["optimizer"], changes)]) == ["reset:typo"]
    changes = Changes.of("reset:0.*", "reset:1.bias")
    mine = to_host(state.common(0))
    before = {name: to_host(each) for name, each in states_of(model, optimizer).items()}
    state.apply_common(common, ["optimizer"], changes, state.fresh_tensors(found))
    assert torch.equal(model[1].weight, common["dense"]["1.weight"])
    assert not torch.equal(mine["dense"]["1.weight"], common["dense"]["1.weight"])
    after = states_of(model, optimizer)
    for name in ("0.weight", "0.bias", "1.bias"):
        assert torch.equal(model.state_dict()[name], mine["dense"][name]), name
        assert all(torch.equal(after[name][key], value) for key, value in before[name].items()), name
    assert any(not torch.equal(after["1.weight"][key], value) for key, value in before["1.weight"].items())


def test_a_registered_state_starts_anew_if_it_is_named():
    """Such as an optimizer of other parameters than before, which cannot be matched."""
    _, _, saved = trained(2, adam)
    common = saved.common(2)
    model = layers(2, extra=True)
    optimizer = adam(model)
    state = ModelState(model)
    state.register("optimizer", OptimizerState(optimizer), per_rank=False)
    words = ("reset:*",)
    state.check(common, changes=Changes.of(*words))
    fresh = state.fresh_tensors(state.differences(common))
    with pytest.raises(MismatchError, match="'optimizer' refuses what was saved"):
        state.apply(common, None, (), Changes.of(*words), fresh)
    assert state.apply(common, None, (), Changes.of(*words, "reset:optimizer"), fresh) == 2
