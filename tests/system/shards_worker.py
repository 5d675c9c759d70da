"""Trains a model with tables of every kind over the ranks there are; tells what each rank found.

`torchrun ... tests/system/shards_worker.py FILE`: FILE holds, for each rank, its shards before and after
three steps.
"""

import sys

import torch
import torch.distributed as dist

from cpr.shards import dense_tensors, find_shards
from tests.cpr.shards.models import DIM, bags, batch, shard

LAYOUT = {"a": "tw", "b": "tw_last", "c": "cw", "d": "dp", "e": "unfused", "f": "rw"}
ROWS = {"a": 10, "b": 9, "c": 7, "d": 5, "e": 6, "f": 11}


def described(found):
    """A shard by value."""
    return {
        "name": found.name,
        "fqn": found.table_fqn,
        "shape": found.table_shape,
        "place": (found.row_offset, found.col_offset),
        "replicated": found.replicated,
        "columns": {name: column.detach().clone() for name, column in found.columns.items()},
        "counters": {name: counter.item() for name, counter in found.counters.items()},
    }


def in_state_dict(model):
    """Pieces of this rank as TorchRec's state dict places them: (table, row, column) -> weights."""
    pieces = {}
    for name, value in model.state_dict().items():
        if ".embedding_bags." in name:
            fqn = name.removesuffix(".weight")
            if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
                pieces[fqn, 0, 0] = value.detach().clone()
                continue
            for local in value.local_shards():
                pieces[fqn, *local.metadata.shard_offsets] = local.tensor.detach().clone()
    return pieces


def main(path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = shard(LAYOUT, bags=bags(**ROWS))
    parameters = [
        parameter
        for parameter in model.parameters()
        if parameter.numel() and not hasattr(parameter, "_in_backward_optimizers")
    ]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    shards = find_shards(model, [optimizer])
    for found in shards:  # a value that tells its place
        row = torch.arange(found.row_offset, found.row_offset + found.num_rows).unsqueeze(1)
        column = torch.arange(found.col_offset, found.col_offset + found.num_cols)
        found.weights.copy_(row * DIM + column)
    result = {"before": [described(found) for found in shards], "pieces": in_state_dict(model)}
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        features = batch(10 * step + dist.get_rank(), 8, **ROWS)
        model({"bags": features}).square().mean().backward()
        optimizer.step()
    result["after"] = [described(found) for found in shards]
    result["dense"] = {name: tensor.clone() for name, tensor in dense_tensors(model).items()}
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        torch.save(results, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
