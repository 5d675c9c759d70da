"""P3 on one rank: training is bit for bit the same, with waits and updates in the right places."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.optim import SGD, Adagrad, Adam

from dlrm.comm.p3 import scheduler
from dlrm.comm.p3.comm_thread import ExchangeError, StepSender
from dlrm.comm.p3.scheduler import PriorityExchange

pytestmark = pytest.mark.usefixtures("world_of_one")
STEPS = 8
SMALL = {"slice_values": 64, "fuse_values": 16}
"""Several slices for a weight, and one for all biases."""


class Net(nn.Module):
    """Two layers, of which the second is left out where the batch has an odd number of samples."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(12, 1)  # registered first, and used last
        self.first = nn.Linear(10, 12)
        self.extra = nn.Linear(12, 12)

    def forward(self, x):
        x = self.first(x).tanh()
        if len(x) % 2 == 0:
            x = x + self.extra(x).tanh()
        return self.last(x)


class Fused(Net):
    """Reads the parameters of its layers, and calls none of them."""

    def forward(self, x):
        x = linear(x, self.first.weight, self.first.bias).tanh()
        x = x + linear(x, self.extra.weight, self.extra.bias).tanh()
        return linear(x, self.last.weight, self.last.bias)


class Tied(Net):
    """Uses one weight in two modules."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(12, 12)
        self.again.weight = self.extra.weight

    def forward(self, x):
        return self.last(self.extra(self.again(self.first(x)).tanh()))


class Bare(Net):
    """Is not called itself, nor are its layers: parameters are updated at once."""

    def __call__(self, x):
        return self.last.forward(self.first.forward(x).tanh())


def make(kind=Net):
    torch.manual_seed(0)
    return kind()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6 + (step % 3 == 1), 10, generator=generator)


def loss_of(model, step):
    return (model(batch(step)) - 1).square().mean()


def train_plainly(model, optimizer, steps=STEPS, rates=None):
    for step in range(steps):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter)
            parameter.grad = gradient if parameter.grad is None else gradient.copy_(parameter.grad)
        optimizer.step()


def train(exchange, model, optimizer, steps=STEPS, rates=None):
    for step in range(steps):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.zero_grad()
        loss_of(model, step).backward()
        exchange.step()


def assert_equal(model, other):
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "fused adagrad": lambda parameters: Adagrad(parameters, lr=0.1, fused=True),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("kind", [Net, Tied])
def test_as_on_a_gpu_slices_are_sent_at_the_step_in_the_order_of_use(kind, monkeypatch):
    """And by the thread that trains, so that all ranks start their collectives in one order."""
    monkeypatch.setattr(scheduler, "CommThread", StepSender)
    ours, theirs = make(kind), make(kind)
    mine, other = (OPTIMIZERS["sgd"](model.parameters()) for model in (ours, theirs))
    sent, all_reduce = [], dist.all_reduce

    def record(vector, group):
        sent.append((threading.current_thread(), vector.storage_offset()))
        all_reduce(vector, group=group)

    monkeypatch.setattr(scheduler.dist, "all_reduce", record)
    with PriorityExchange(ours, mine, **SMALL) as exchange:
        for step in range(STEPS):
            loss_of(ours, step).backward()
            assert len(sent) == step * len(exchange.order)
            exchange.step()
        begins, names = sorted(each.begin for each in exchange._slices), exchange.order
    train_plainly(theirs, other)
    assert_equal(ours, theirs)
    assert {thread for thread, _ in sent} == {threading.current_thread()}
    assert sorted(offset for _, offset in sent[-len(begins) :]) == begins
    is_of_first = ["first" in name for name in names]
    assert is_of_first == sorted(is_of_first, reverse=True)


@pytest.mark.parametrize("kind", [Net, Fused, Tied, Bare])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_bit_for_bit_the_same(kind, optimizer):
    """With learning rates that change, and a layer that is not always used, whose gradient is then 0."""
    rates = [0.1 / (step + 1) for step in range(STEPS)]
    ours, theirs = make(kind), make(kind)
    mine, other = (OPTIMIZERS[optimizer](model.parameters()) for model in (ours, theirs))
    with PriorityExchange(ours, mine, **SMALL) as exchange:
        train(exchange, ours, mine, rates=rates)
    train_plainly(theirs, other, rates=rates)
    assert_equal(ours, theirs)
    train_plainly(ours, mine)  # after `close`, as before
    train_plainly(theirs, other)
    assert_equal(ours, theirs)
    assert not ours.first._forward_pre_hooks


def test_slices_that_are_needed_first_are_sent_first(monkeypatch):
    """On a link so slow that everything is ready when the first slice is through."""
    calls = []

    def noted(ready_s, needed, takes_s):
        calls.append(needed)
        return issue_order([0.0] * len(needed), needed, takes_s)

    issue_order = scheduler.issue_order
    monkeypatch.setattr(scheduler, "issue_order", noted)
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    with PriorityExchange(model, optimizer, slice_values=64, fuse_values=12) as exchange:
        train(exchange, model, optimizer)
        order = exchange.order
    assert len(calls) == 1
    layers = [name.split(".")[0] for name in order]
    # the bias of the last layer, of one value, shares its slice with nothing: the others have 12
    assert layers == ["first"] * 3 + ["extra"] * 4 + ["last"] * 2


def test_a_layer_waits_for_its_own_slices_and_updates_just_those(monkeypatch):
    model = make()
    gate, seen = threading.Event(), {}

    def wait(vector, group):
        if vector.numel() == 144:  # the weight of `extra`
            assert gate.wait(30), "the forward pass waited too early"

    def look(module, inputs, output):
        if not gate.is_set() and "before" in seen:
            seen["extra"] = torch.equal(model.extra.weight, seen["before"]["extra.weight"])
            seen["first"] = torch.equal(model.first.weight, seen["before"]["first.weight"])
            gate.set()

    model.first.register_forward_hook(look)
    optimizer = SGD(model.parameters(), lr=0.1)
    with PriorityExchange(model, optimizer, slice_values=200, fuse_values=0) as exchange:
        monkeypatch.setattr(dist, "all_reduce", wait)
        loss_of(model, 0).backward()
        exchange.step()
        seen["before"] = {name: each.detach().clone() for name, each in model.named_parameters()}
        loss_of(model, 2)
        assert exchange.waited_s > 0
    assert seen["extra"], "the layer that is next was updated too early"
    assert not seen["first"], "the layer was not updated before its turn"
    assert not torch.equal(model.extra.weight, seen["before"]["extra.weight"])


def test_evaluation_and_state_dict_see_the_last_update():
    ours, theirs = make(), make()
    mine, other = (Adam(model.parameters(), lr=0.01) for model in (ours, theirs))
    with PriorityExchange(ours, mine, **SMALL) as exchange:
        train(exchange, ours, mine, steps=1)
        train_plainly(theirs, other, steps=1)
        with torch.inference_mode():
            assert torch.equal(ours(batch(1)), theirs(batch(1)))
        state = ours.state_dict()
        assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())
        steps = [each["step"] for each in mine.state_dict()["state"].values()]
        assert steps == [1] * 6
        train(exchange, ours, mine)  # Adam's state, made under inference mode, can still be changed
    train_plainly(theirs, other)
    assert_equal(ours, theirs)


def test_an_error_in_the_thread_reaches_the_next_wait_with_the_slices_name(monkeypatch):
    model, calls = make(), []

    def fail(vector, group):
        calls.append(vector.numel())
        if calls.count(120) > 2:  # the weight of `first`
            raise ConnectionError("rank 1 is gone")

    optimizer = SGD(model.parameters(), lr=0.1)
    exchange = PriorityExchange(model, optimizer, slice_values=200, fuse_values=0)
    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(ExchangeError, match=r"first\.weight in step 3 .* rank 1 is gone"), exchange:
        train(exchange, model, optimizer)


def test_two_backward_passes_in_a_step_are_refused():
    model = make()
    with PriorityExchange(model, SGD(model.parameters(), lr=0.1)):
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"got a second gradient before PriorityExchange\.step"):
            loss_of(model, 0).backward()


def test_a_parameter_that_is_used_without_calling_its_module_is_refused():
    """It would be one step old."""
    model = make()
    exchange = PriorityExchange(model, SGD(model.parameters(), lr=0.1))
    loss_of(model, 0).backward()
    exchange.step()
    past_the_modules = Fused.forward(model, batch(0)).sum()
    with pytest.raises(RuntimeError, match="was used before the update of the last step"), exchange:
        past_the_modules.backward()


def test_a_weight_in_column_major_layout_trains_the_same():
    """Fused optimizers go through weight and gradient side by side in memory."""
    ours, theirs = make(), make()
    for model in (ours, theirs):
        model.first.weight.data = model.first.weight.data.t().contiguous().t()
    mine, other = (Adagrad(model.parameters(), lr=0.1, fused=True) for model in (ours, theirs))
    with PriorityExchange(ours, mine, **SMALL) as exchange:
        train(exchange, ours, mine)
    train_plainly(theirs, other)
    assert_equal(ours, theirs)


def test_only_the_optimizers_parameters_are_exchanged():
    model = make()
    frozen = model.extra.weight.detach().clone()
    optimizer = SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
    with PriorityExchange(model, optimizer, **SMALL) as exchange:
        assert not any("extra" in name for name in exchange.order)
        train(exchange, model, optimizer)
    assert torch.equal(model.extra.weight, frozen)


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="of the 6 parameters that the optimizer trains, 0 are the model's"):
        PriorityExchange(make(), SGD(make().parameters(), lr=0.1))
