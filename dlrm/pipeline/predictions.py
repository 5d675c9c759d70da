"""Prediction of rows at which late gradients are computed, from their last change (arXiv 2003.11666)."""

import torch
from torch import Tensor

from dlrm.sharding.host_lookup import HostLookup, Reads


@torch.no_grad()
def predicted_change(lookup: HostLookup, trained: Reads, following: Reads) -> Tensor | None:
    """What the embeddings of a batch would change by if rows changed once more as in their last update.

    Adagrad's rows have no velocity, so that the paper's second form of linear weight prediction, `w + (w -
    w_before)`, is left. It is for rows that change in this update and the next; others have no reason to
    change again.

    Args:
        lookup: keeps its last change.
        trained: reads of the batch whose update is predicted.
        following: reads of the batch whose embeddings are looked up before that update.

    Returns:
        `[B, F * dim]` in the lookup's output dtype; None: there was no update yet.
    """
    if lookup.last_change is None:
        return None
    rows, before = lookup.last_change
    changes = lookup.weights.view(-1, lookup.bags.dim)[rows] - before
    changes *= torch.isin(rows, trained.rows.to(torch.int64)).unsqueeze(1)
    no_change = changes.new_zeros((1, lookup.bags.dim))
    places = torch.searchsorted(rows, following.rows.to(torch.int64)).clamp_(max=max(rows.numel() - 1, 0))
    places[rows[places] != following.rows] = rows.numel()
    reads = following._replace(rows=places.to(following.rows.dtype))
    return lookup.bags.pool(torch.cat([changes, no_change]), reads)
