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


def learned(forward=None):
    model, asked = Net(), []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = list(model.parameters())
    param_order = ParamOrder(
        model, parameters, lambda indices: asked.append([names[id(parameters[index])] for index in indices])
    )
    (forward or model)(torch.ones(2, 3))
    assert not asked, "nothing is learned yet"
    param_order.learn()
    return model, param_order, asked, list(names.values())


def test_each_module_asks_for_its_parameters():
    model, _, asked, _ = learned()
    model(torch.ones(2, 3))
    layers = [f"inner.fused.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    assert asked == [
        ["scale"],
        ["first.weight", "first.bias"],
        layers,
        ["last.weight", "first_again.bias"],
        ["last.weight", "last.bias"],
    ]


def test_a_parameters_turn_is_that_of_its_first_module():
    _, param_order, _, names = learned()
    turn = dict(zip(names, param_order.turns, strict=True))
    assert turn["scale"] < turn["first.weight"] < turn["inner.fused.0.weight"]
    assert turn["inner.fused.0.weight"] == turn["inner.fused.1.bias"]
    assert turn["inner.fused.0.weight"] < turn["last.weight"] == turn["first_again.bias"] < turn["last.bias"]
    assert not param_order.unseen


def test_parameters_without_a_called_module_are_unseen():
    model = Net()
    param_order = ParamOrder(model, list(model.parameters()), lambda indices: None)
    model.forward(torch.ones(2, 3))  # the model itself is not called, and the modules below it are
    param_order.learn()
    names = [name for name, _ in model.named_parameters()]
    assert [names[index] for index in param_order.unseen] == ["scale"]


def test_evaluation_passes_are_ignored():
    model = Net()
    param_order = ParamOrder(model, list(model.parameters()), lambda indices: None)
    with torch.no_grad():
        model(torch.ones(2, 3))
    model.last(model.first(torch.ones(2, 3)))  # the training step calls less
    param_order.learn()
    names = [name for name, _ in model.named_parameters()]
    seen = {"last.bias", "first.weight", "first.bias"}  # `first_again` may read the other weight any time
    assert {names[index] for index in param_order.unseen} == set(names) - seen


def test_close_removes_all_hooks():
    model, param_order, _, _ = learned()
    param_order.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
