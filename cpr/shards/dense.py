"""All of a model that is no table: what every rank holds a copy of."""

from torch import Tensor, nn

from cpr.shards.groups import tables_prefix, walk


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers outside all sharded tables, by their name in `state_dict()`.

    They share memory with the model and need no `no_grad` to be written. A tensor that is used in
    several places of one module appears under each name.

    Args:
        model: a `DistributedModelParallel`, or any module.
    """
    found: dict[str, Tensor] = {}
    inside: tuple[str, ...] = ()
    for path, module in walk(model):
        prefix = tables_prefix(module)
        if prefix is not None:
            inside += (f"{path}{prefix}.",)
        if path.startswith(inside):
            continue
        hidden = module._non_persistent_buffers_set
        persistent = {name: buffer for name, buffer in module._buffers.items() if name not in hidden}
        for name, tensor in (module._parameters | persistent).items():
            if tensor is not None:
                found[f"{path}{name}"] = tensor.detach()
    return found
