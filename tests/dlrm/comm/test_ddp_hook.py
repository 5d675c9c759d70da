"""The hook of a DDP model on one rank; on several ranks, see tests/system/comm."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from dlrm.comm import ddp_hook as module
from dlrm.comm.config import CommConfig
from dlrm.comm.ddp_hook import register
from tests.cpr.shards.models import bags, batch, shard


def gradients(model, inputs):
    model.zero_grad()
    model(inputs).square().sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def test_gradients_of_a_single_rank_are_unchanged(world_of_one):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = DistributedDataParallel(plain, bucket_cap_mb=1e-5)
    hook = register(model, CommConfig(exchange="hi_topk", ratio=0.1))
    for seed in range(3):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        through_ddp = gradients(model, inputs)
        assert all(map(torch.equal, through_ddp, gradients(plain, inputs)))
    assert hook.take_figures().steps == 3
    assert hook.load_state_dict(hook.state_dict()) is None


@pytest.mark.parametrize("exchange", ["priority", "selsync"])
def test_exchanges_that_a_hook_cannot_use_are_refused(world_of_one, exchange):
    taken = "dense, ring, tree, two_level, all_gather, star, star_tree, var, var_tree, hi_topk, auto"
    with pytest.raises(ValueError, match=f"{exchange} does not sum whole gradients.* choose one of {taken}"):
        register(DistributedDataParallel(nn.Linear(2, 2)), CommConfig(exchange=exchange))


def test_the_optimizer_check_is_removed_with_the_model(world_of_one):
    gc.collect()  # hooks of other tests
    before = set(_global_optimizer_pre_hooks)
    model = DistributedDataParallel(nn.Linear(2, 2))
    hook = register(model, CommConfig(exchange="all_gather", ratio=0.5))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    hook.exchange.residual.is_pending = True  # a world of one sends all that it has
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    assert len(set(_global_optimizer_pre_hooks) - before) == 1
    del model, hook, optimizer, scaler
    gc.collect()
    assert set(_global_optimizer_pre_hooks) == before


def test_unsuitable_models_and_options_are_refused(world_of_one):
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel, not a Linear: wrap it first"):
        register(nn.Linear(2, 2), CommConfig())
    with pytest.raises(ValueError, match=r"takes a dlrm\.comm\.config\.CommConfig, not 'ring'"):
        register(DistributedDataParallel(nn.Linear(2, 2)), "ring")
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16.*compute under autocast"):
        register(DistributedDataParallel(nn.Linear(2, 2, dtype=torch.bfloat16)), CommConfig())


def test_parameters_frozen_before_registering_are_reported_and_later_ones_send_zeros(world_of_one):
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    hook = register(model, CommConfig())
    model.module.bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1], [1, 1]]
    assert hook.take_figures().steps == 1
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    model.module.bias.requires_grad_(False)
    register(model, CommConfig())
    with pytest.raises(RuntimeError, match=r"6 values in all, of 4: .* wrap it again"):
        model(torch.ones(1, 2)).sum().backward()


def test_the_device_is_synchronized_before_step_times_are_read_while_exchanges_are_tried(
    world_of_one, monkeypatch
):
    events, now_s = [], iter([1.0, 3.5, 7.0])
    monkeypatch.setattr(module, "finish", lambda device: events.append(device.type))
    monkeypatch.setattr(module.time, "perf_counter", lambda: events.append("time") or next(now_s))
    model = DistributedDataParallel(nn.Linear(2, 2))
    hook = register(model, CommConfig(exchange="ring"))
    for is_settled in (True, False, False):
        monkeypatch.setattr(type(hook.exchange), "is_settled", is_settled)
        monkeypatch.setattr(hook.exchange, "combine", lambda flat, **_: (flat, None))
        monkeypatch.setattr(hook.exchange, "observe", events.append)
        gradients(model, torch.ones(1, 2))
    assert events == ["time", "cpu", "time", 2.5, "cpu", "time", 3.5]


def test_residuals_are_refused_by_a_hook_that_cannot_send_them(world_of_one):
    hooks = [
        register(DistributedDataParallel(nn.Linear(2, 2)), CommConfig(exchange=exchange))
        for exchange in ("star", "dense", "ring")
    ]
    state = hooks[0].state_dict()
    state["residual"] = {**state["residual"], "memory": {"residual": torch.ones(6)}}
    with pytest.raises(ValueError, match=r"with comm.exchange=ring, where it is dense"):
        hooks[1].load_state_dict(state)
    assert hooks[2].load_state_dict(state) is None


def test_the_hook_exchanges_a_torchrec_models_dense_part_only(world_of_one):
    rows = {"a": 20, "b": 9}
    model = shard({"a": "tw", "b": "rw"}, ebc=bags(**rows))
    (data_parallel,) = (each for each in model.modules() if isinstance(each, DistributedDataParallel))
    hook = register(data_parallel, CommConfig(exchange="all_gather", ratio=0.1))
    dense = dict(model.module.dense.named_parameters())
    for seed in range(2):
        model.zero_grad()
        model({"ebc": batch(seed, 4, **rows)}).square().sum().backward()
    assert hook.take_figures().steps == 2
    assert hook.exchange.num_values == sum(each.numel() for each in dense.values())
    assert all(each.grad.any() for each in dense.values())
