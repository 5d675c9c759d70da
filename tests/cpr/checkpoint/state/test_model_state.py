"""Per-rank state after a change of the world size, and refusal of other models."""

import pytest
import torch
from torch import nn

from cpr.checkpoint.state.model_state import ModelState
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
