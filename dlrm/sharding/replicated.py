"""Gradient exchange of replicated tables by touched rows, instead of DistributedDataParallel's dense sum."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpr.shards.groups import tables_prefix, walk
from dlrm.comm.row_sparse import send_touched_rows


def average_touched_rows(model: nn.Module) -> None:
    """Let replicated fp32 tables send only the rows that samples touched; before the first backward pass."""
    for _, module in walk(model):
        if tables_prefix(module) is None:
            continue
        lookups: Any = module._lookups
        for lookup in lookups:
            if isinstance(lookup, DistributedDataParallel):
                tables = [kernel.emb_module for kernel in lookup.module._emb_modules]
                send_touched_rows(lookup, {each.weights: each.embedding_specs for each in tables})
