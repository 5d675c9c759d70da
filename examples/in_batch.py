"""Retrieval among the items of a batch: the loss and the metrics of `two_tower.py` and `sequence.py`.

The candidates of a query are all items in the batch of its rank. So they come free of charge, and popular
items are candidates more often than others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass
class InBatch:
    """Scores of the queries of `B` samples for the items of these samples."""

    scores: Tensor
    """fp32 `[B, B]`: row b has the scores of query b, column b those of item b."""
    item_ids: Tensor
    """int64 `[B]`: samples may have the same item."""

    def loss(self, labels: Tensor) -> Tensor:
        """Mean cross entropy of the own item of each clicked sample (in-batch softmax), a scalar."""
        clicked = labels == 1
        if not clicked.any():
            return self.scores.sum() * 0.0
        own = torch.arange(len(labels), device=labels.device)
        return cross_entropy(self._without_twins()[clicked], own[clicked])

    def recall(self, labels: Tensor, k: int) -> dict[str, Tensor]:
        """For each clicked sample whether its item is among the best `k`, and the chance of that, `[B]` each.

        Samples without a click have no query, NaN; padded ones, whose label is NaN, are no candidates either.
        """
        scores = self._without_twins().masked_fill(labels.isnan(), -torch.inf)
        own = self.scores.diagonal().unsqueeze(1)
        better = (scores > own).sum(1)
        candidates = scores.isfinite().sum(1)
        clicked = labels == 1
        return {
            f"recall@{k}": torch.where(clicked, (better < k).float(), torch.nan),
            f"chance@{k}": torch.where(clicked, (k / candidates).clamp(max=1.0), torch.nan),
        }

    def _without_twins(self) -> Tensor:
        """The scores, -inf where another sample has the same item."""
        twins = self.item_ids.unsqueeze(0) == self.item_ids.unsqueeze(1)
        return self.scores.masked_fill(twins.fill_diagonal_(False), -torch.inf)
