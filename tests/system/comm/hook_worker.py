"""Checks of hooks of DDP models between four ranks."""

import itertools

import torch

from dlrm.comm.config import CommConfig
from dlrm.comm.ddp_hook import register
from tests.system.comm.common import (
    SUMMING,
    Layers,
    assert_same_bits,
    buffer_of,
    build,
    configured,
    ddp,
    flat_gradient,
    of_all,
    samples,
)


def check_a_hook_equals_an_exchange_of_the_whole_gradient():
    """Bit for bit, before and after DDP rebuilds its buckets."""
    for as_view, as_zeros in itertools.product((False, True), repeat=2):
        for mean in (False, True):
            model, alone = ddp(gradient_as_bucket_view=as_view), Layers()
            hook = register(model, CommConfig(exchange="all_gather", ratio=0.03), mean=mean)
            size = sum(parameter.numel() for parameter in alone.parameters())
            exchange = build(size, exchange="all_gather", ratio=0.03)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
            for step in range(8):
                inputs, targets, mine = samples((4, 4, 4, 4), step)
                spare = step in {0, 4}  # in other steps, its residual is still sent
                for each, optimizer in zip((model, alone), optimizers, strict=True):
                    optimizer.zero_grad(set_to_none=not as_zeros)
                    (each(inputs[mine], spare) - targets[mine]).square().mean().backward()
                total, _ = exchange.combine(buffer_of(exchange, flat_gradient(alone)), mean=mean)
                assert torch.equal(flat_gradient(model), total), (as_view, as_zeros, mean, step)
                for parameter, piece in zip(
                    alone.parameters(), total.split([p.numel() for p in alone.parameters()]), strict=True
                ):
                    parameter.grad = piece.view_as(parameter).clone()
                for optimizer in optimizers:
                    optimizer.step()
                assert_same_bits(torch.cat([parameter.view(-1) for parameter in model.parameters()]))
            assert hook.take_figures().steps == 8


def check_a_restored_hook_continues_bit_for_bit():
    def steps(model, first, last):
        for step in range(first, last):
            inputs, targets, mine = samples((4, 4, 4, 4), step)
            model.zero_grad()
            (model(inputs[mine], True) - targets[mine]).square().mean().backward()
        return flat_gradient(model)

    config = CommConfig(exchange="hi_topk", ratio=0.05)
    model, other = ddp(), ddp()
    hook, restored = register(model, config), register(other, config)
    steps(model, 0, 3)
    assert restored.load_state_dict(hook.state_dict()) is None
    assert torch.equal(steps(other, 3, 6), steps(model, 3, 6))


def check_gradients_accumulate_under_no_sync():
    model, alone = ddp(), Layers()
    hook = register(model, CommConfig(exchange="all_gather", ratio=1.0))
    for step in range(3):
        inputs, targets, mine = samples((4, 4, 4, 4), step)
        early, late = inputs[mine].split(2), targets[mine].split(2)
        with model.no_sync():
            (model(early[0], True) - late[0]).square().mean().backward()
        (model(early[1], True) - late[1]).square().mean().backward()
        for part, target in zip(early, late, strict=True):
            (alone(part, True) - target).square().mean().backward()
        expected = of_all(flat_gradient(alone)).mean(0)
        torch.testing.assert_close(flat_gradient(model), expected)
        model.zero_grad()
        alone.zero_grad()
    assert hook.take_figures().steps == 3


def check_loading_a_state_replaces_the_residual():
    config = CommConfig(exchange="all_gather", ratio=0.05)
    model = ddp()
    hook = register(model, config)
    fresh = hook.state_dict()
    fresh = {**fresh, "residual": None}
    for step in range(3):
        inputs, targets, mine = samples((4, 4, 4, 4), step)
        (model(inputs[mine], True) - targets[mine]).square().mean().backward()
    assert hook.exchange.residual.energy > 0
    assert hook.load_state_dict(fresh) is None
    assert hook.exchange.residual.energy == 0
    assert hook.exchange.steps_done == 0


def check_uneven_batches_train_like_one_process():
    """Losses are scaled by a rank's share of all samples, and gradients summed; one rank has no samples."""
    sizes = (7, 1, 0, 4)
    inputs, targets, mine = samples(sizes, 9)
    for exchange in SUMMING:
        model, alone = ddp(), Layers()
        register(model, configured(exchange=exchange, ratio=1.0), mean=False)
        for _ in range(3):
            for each, part in ((model, mine), (alone, slice(None))):
                each.zero_grad()
                (each(inputs[part], True) - targets[part]).square().sum().div(sum(sizes)).backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.sub_(0.1 * parameter.grad)
            torch.testing.assert_close(
                flat_gradient(model), flat_gradient(alone), rtol=1e-5, atol=1e-6, msg=exchange
            )
