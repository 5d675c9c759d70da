"""The dense parameters of a sharded model."""

from torch import nn


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters outside all embedding tables."""
    return [parameter for name, parameter in model.named_parameters() if ".embedding_bags." not in name]
