"""Dense tensors of a model: all parameters and buffers outside of tables, replicated on every rank."""

from torch import Tensor, nn

from cpr.shards.groups import tables_prefix, walk


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers outside of sharded tables, by their name in `state_dict()`.

    The tensors share memory with the model and can be written without `no_grad`. A tensor with several names
    in one module appears under each.

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
