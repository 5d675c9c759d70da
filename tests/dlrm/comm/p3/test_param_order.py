"""Parameters are needed by their own module, or by the nearest called module above."""

import torch
from torch import nn
from torch.nn.functional import linear

from dlrm.comm.p3.param_order import ParamOrder


class Layers(nn.Sequential):
    """Reads its layers' weights without calling them."""

    def forward(self, x):
        for layer in self:
            x = linear(x, layer.weight, layer.bias)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.inner = nn.ModuleDict({"fused": Layers(nn.Linear(3, 3), nn.Linear(3, 3))})
        self.first = nn.Linear(3, 3)
        self.first_again = nn.Linear(3, 3)
        self.first_again.weight = self.last.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.inner["fused"](self.first(x))
        return self.last(self.first_again(x)) * self.scale


def learned(forward):
    """The order that `forward(model)` shows; `asked` collects the names that modules ask for."""
    model, asked = Net(), []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = list(model.parameters())
    param_order = ParamOrder(
        model, parameters, lambda indices: asked.append([names[id(parameters[index])] for index in indices])
    )
    forward(model)
    assert not asked, "nothing is learned yet"
    param_order.learn()
    return model, param_order, asked, list(names.values())


def test_each_module_asks_for_its_parameters_when_it_is_called():
    model, param_order, asked, names = learned(lambda model: model(torch.ones(2, 3)))
    model(torch.ones(2, 3))
    layers = [f"inner.fused.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    assert asked == [
        ["scale"],
        ["first.weight", "first.bias"],
        layers,
        ["last.weight", "first_again.bias"],
        ["last.weight", "last.bias"],
    ]
    turn = dict(zip(names, param_order.turns, strict=True))  # that of the first module that asks
    assert turn["scale"] < turn["first.weight"] < turn["inner.fused.0.weight"]
    assert turn["inner.fused.0.weight"] == turn["inner.fused.1.bias"]
    assert turn["inner.fused.0.weight"] < turn["last.weight"] == turn["first_again.bias"] < turn["last.bias"]
    assert not param_order.unseen
    param_order.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_parameters_without_a_called_module_are_unseen():
    # the model itself is not called, and the modules below it are
    _, param_order, _, names = learned(lambda model: model.forward(torch.ones(2, 3)))
    assert [names[index] for index in param_order.unseen] == ["scale"]


def test_evaluation_passes_are_ignored():
    def evaluate_then_train(model):
        with torch.no_grad():
            model(torch.ones(2, 3))
        model.last(model.first(torch.ones(2, 3)))  # the training step calls less

    _, param_order, _, names = learned(evaluate_then_train)
    seen = {"last.bias", "first.weight", "first.bias"}  # `first_again` may read the other weight any time
    assert {names[index] for index in param_order.unseen} == set(names) - seen
