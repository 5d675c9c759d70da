"""The dense parameters of a model."""

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from cpr.shards.groups import tables_prefix, walk


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the trained parameters outside all embedding tables, sharded or not."""
    unsharded = (EmbeddingBagCollection, EmbeddingCollection)
    collections = tuple(
        path for path, module in walk(model) if tables_prefix(module) or isinstance(module, unsharded)
    )
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not name.startswith(collections)
    ]
