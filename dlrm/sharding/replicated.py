"""Gradient exchange of replicated tables by touched rows, instead of DistributedDataParallel's dense sum."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpr.shards.groups import tables_prefix, walk
from dlrm.comm.row_sparse import send_touched_rows


def average_touched_rows(model: nn.Module) -> int:
    """Let replicated fp32 tables send only the rows that samples touched; before the first backward pass.

    Returns the number of modules of replicated tables.
    """
    found = 0
    for _, module in walk(model):
        if tables_prefix(module) is None:
            continue
        lookups: Any = module._lookups
        for lookup in lookups:
            if isinstance(lookup, DistributedDataParallel):
                tables = [kernel.emb_module for kernel in lookup.module._emb_modules]
                send_touched_rows(lookup, {each.weights: each.embedding_specs for each in tables})
                found += 1
    return found
