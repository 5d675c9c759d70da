"""A small computation with every kind of exchange, on ranks and in one process."""

from dataclasses import dataclass

import torch

OUT = 3


@dataclass
class Values:
    """What a chain begins with, or the gradients of that: for each rank one tensor."""

    own: list
    """Samples, `[samples of the rank, sum of widths]`."""
    weights: list
    """`[columns of the rank, OUT]`."""
    factors: list
    """`[OUT]`."""


def values(sizes, widths):
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return Values(
        own=[draw(size, sum(widths)) for size in sizes],
        weights=[draw(width, OUT) for width in widths],
        factors=[draw(OUT) for _ in sizes],
    )


def loss_of(result):
    """A rank's mean loss."""
    return result.square().sum() / max(len(result), 1)


def on_rank(exchange, rank, sizes, widths):
    """Result of a rank, and gradients of its samples, weights and factors."""
    begin = values(sizes, widths)
    leaves = (begin.own[rank], begin.weights[rank], begin.factors[rank])
    own, weight, factor = leaves
    partial = exchange.deal_columns(own, widths, sizes) @ weight
    result = exchange.sum_to_owners(exchange.sum_to_all(partial).tanh() * factor, sizes)
    loss_of(result).backward()
    return result.detach(), *(leaf.grad for leaf in leaves)


def alone(sizes, widths):
    """The same of all ranks by plain autograd; gradients of samples are of the rank's own mean loss."""
    begin = values(sizes, widths)
    hidden = (torch.cat(begin.own) @ torch.cat(begin.weights)).tanh()
    results = (hidden * sum(begin.factors)).split(sizes)
    (sum(loss_of(result) for result in results) / len(sizes)).backward()
    return [
        (result.detach(), own.grad * len(sizes), weight.grad, factor.grad)
        for result, own, weight, factor in zip(results, begin.own, begin.weights, begin.factors, strict=True)
    ]
