"""Workers of `test_splitting` that use a `SplitExchange` alone."""

import torch
import torch.distributed as dist

from dlrm.sharding.splitting.exchange import SplitExchange
from tests.dlrm.sharding.splitting import chain

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Most that a number changes when it is rounded, relative to itself."""
SIZES = (400, 0, 37)
SMALL = 1e-3 / sum(SIZES)
"""A gradient of the mean over the samples: as it is, fp16 would be wrong by several percent."""


def check():
    """In the group of three ranks that `SIZES` is for."""
    same_as_in_one_process()
    for dtype in (torch.float32, torch.bfloat16):
        sums_are_equal_on_all_ranks(SplitExchange(dist.group.WORLD), dtype)
    for dtype in ROUNDING:
        exchange = SplitExchange(dist.group.WORLD, dtype)
        sums_are_equal_on_all_ranks(exchange, torch.float32)
        nothing_is_rounded_twice(exchange)
        what_is_dealt_is_rounded_once(exchange)


def same_as_in_one_process():
    exchange = SplitExchange(dist.group.WORLD)
    for sizes, widths in (((4, 4, 4), (2, 2, 2)), ((4, 0, 3), (4, 0, 8)), ((0, 1, 0), (0, 0, 1))):
        found = chain.on_rank(exchange, exchange.rank, sizes, widths)
        expected = chain.alone(sizes, widths)[exchange.rank]
        for tensor, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


def sums_are_equal_on_all_ranks(exchange, dtype):
    partial = partials(100, 7)[exchange.rank].to(dtype)
    total = exchange.sum_to_all(partial)
    assert total.dtype == dtype
    totals = [torch.empty_like(total) for _ in range(exchange.world_size)]
    dist.all_gather(totals, total)
    assert all(torch.equal(each, total) for each in totals)


def nothing_is_rounded_twice(exchange):
    """A sum is off by no more than its parts are when they are rounded; of replicas, once more as a whole."""
    rounding = ROUNDING[exchange.wire_dtype]
    every = partials(sum(SIZES), 5)
    total, most = sum(every), sum(each.abs() for each in every) * rounding
    own = slice(sum(SIZES[: exchange.rank]), sum(SIZES[: exchange.rank + 1]))
    partial = every[exchange.rank].float().requires_grad_()
    result = exchange.sum_to_owners(partial, SIZES)
    is_rounded_by(result, total[own], most[own])
    (result * SMALL).sum().backward()
    expected = torch.full_like(partial, SMALL / exchange.world_size)
    is_rounded_by(partial.grad, expected, expected * rounding)
    partial.grad = None
    result = exchange.sum_to_all(partial)
    is_rounded_by(result, total, most + (total.abs() + most) * rounding)
    (result * SMALL).sum().backward()
    expected = torch.full_like(partial, SMALL * exchange.world_size)
    is_rounded_by(partial.grad, expected, expected * 2 * rounding)


def what_is_dealt_is_rounded_once(exchange):
    rounding, widths = ROUNDING[exchange.wire_dtype], (4, 0, 8)
    every, rank = partials(sum(SIZES), 12)[0], exchange.rank
    own = every.split(SIZES)[rank].float().requires_grad_()
    dealt = exchange.deal_columns(own, widths, SIZES)
    expected = every.split(widths, dim=1)[rank]
    is_rounded_by(dealt, expected, expected.abs() * rounding)
    (dealt * SMALL).sum().backward()
    expected = torch.full_like(own, SMALL * exchange.world_size)
    is_rounded_by(own.grad, expected, expected * rounding)


def partials(size, width):
    """Of all ranks, in float64, as fp32 has them."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, width, generator=generator).double() for _ in range(dist.get_world_size())]


def is_rounded_by(found, expected, most):
    """At most so much, and by something: what travels is rounded, and not more than that."""
    error = (found.detach().double() - expected).abs()
    assert bool((error <= most * (1 + 2**-10) + 1e-12).all()), float((error / most).max())
    assert not error.numel() or float(error.max()) > 0
