"""Models of a user for exports: one that can be traced, and some that cannot."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig


class Branching(nn.Module):
    """Depends on a value."""

    def __init__(self, options, inputs):
        super().__init__()
        user = inputs.features[0]
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            is_weighted=True,
            tables=[
                EmbeddingBagConfig(
                    name="users", embedding_dim=8, num_embeddings=user.rows, feature_names=[user.name]
                )
            ],
        )
        self.linear = nn.Linear(8 + len(inputs.dense), 1)

    def logits_of(self, dense, sparse):
        return self.linear(torch.cat([dense, self.tables(sparse).values()], dim=1)).squeeze(1)

    def forward(self, dense, sparse):
        logits = self.logits_of(dense, sparse)
        return logits * 2 if dense.sum() > 0 else logits


class WithoutLogits(Branching):
    """Has a loss of its own."""

    def forward(self, dense, sparse):
        return self.logits_of(dense, sparse)

    def loss(self, outputs, labels):
        return (outputs - labels).square().mean()

    def logits(self, outputs):
        return None


@dataclass
class Scores:
    """Outputs in a class of the user."""

    pairs: Tensor
    dense: Tensor


class InClass(WithoutLogits):
    """Scores each sample with each other one, as `examples/in_batch.py`."""

    def forward(self, dense, sparse):
        scores = self.logits_of(dense, sparse)
        return Scores(scores.unsqueeze(1) - scores, dense)

    def loss(self, outputs, labels):
        return outputs.pairs.square().mean()


class Doubled(WithoutLogits):
    """Its logits are float64."""

    def logits(self, outputs):
        return outputs.double()


class Foreign(Branching):
    """Uses an operator of FBGEMM."""

    def forward(self, dense, sparse):
        logits = self.logits_of(dense, sparse)
        lengths = sparse["items"].lengths()
        return logits + torch.ops.fbgemm.segment_sum_csr(1, lengths.cumsum(0), logits)[:0].sum()


class Counting(Branching):
    """Gives something else in each call."""

    calls = 0

    def forward(self, dense, sparse):
        type(self).calls += not self.training
        return self.logits_of(dense, sparse) + float(self.calls)


class Sequences(nn.Module):
    """Attention of the user over the padded list of items."""

    def __init__(self, options, inputs):
        super().__init__()
        user, items, _ = inputs.features
        self.tables = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(
                    name=f"of_{each.name}",
                    embedding_dim=8,
                    num_embeddings=each.rows,
                    feature_names=[each.name],
                )
                for each in (user, items)
            ],
        )
        self.linear = nn.Linear(8 + len(inputs.dense), 1)

    def forward(self, dense, sparse):
        rows = self.tables(sparse)
        items = rows["items"].to_padded_dense(5)
        scores = torch.einsum("bd,bld->bl", rows["user"].values(), items)
        return self.linear(
            torch.cat([dense, torch.einsum("bl,bld->bd", scores.tanh(), items)], dim=1)
        ).squeeze(1)
