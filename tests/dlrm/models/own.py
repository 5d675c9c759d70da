"""Models as a user would write them, for tests of `model.kind = "package.module:Class"`."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType


def tables_for(features, dim, device="meta", **settings):
    return EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(
                name=f"of_{feature.name}",
                embedding_dim=dim,
                num_embeddings=feature.rows,
                feature_names=[feature.name],
                **settings,
            )
            for feature in features
        ],
    )


class Concatenated(nn.Module):
    """An MLP over dense features and all pooled embeddings; gives logits."""

    def __init__(self, options, inputs):
        super().__init__()
        self.names = [feature.name for feature in inputs.features]
        dim = options.get("dim", 8)
        self.tables = tables_for(inputs.features, dim)
        width = len(inputs.dense) + len(self.names) * dim
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def vectors(self, dense, sparse):
        pooled = self.tables(sparse)
        return torch.cat([dense, *(pooled[name] for name in self.names)], dim=1)

    def forward(self, dense, sparse):
        return self.mlp(self.vectors(dense, sparse)).squeeze(1)


class TwoTables(nn.Module):
    """Tables of two widths, the narrow one shared by two features with mean pooling; dropout.

    Gives two vectors, and has a loss and metrics of its own, but no logits.
    """

    def __init__(self, options, inputs):
        super().__init__()
        names = [feature.name for feature in inputs.features]
        rows = {feature.name: feature.rows for feature in inputs.features}
        self.shared, self.others = names[:2], names[2:]
        narrow = EmbeddingBagConfig(
            name="shared",
            embedding_dim=4,
            num_embeddings=max(rows[name] for name in self.shared),
            feature_names=self.shared,
            pooling=PoolingType.MEAN,
        )
        wide = tables_for(inputs.features[2:], 8).embedding_bag_configs()
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[narrow, *wide])
        self.left = nn.Linear(2 * 4, 8)
        self.right = nn.Linear(len(self.others) * 8, 8)
        self.dropout = nn.Dropout(options.get("dropout", 0.0))

    def forward(self, dense, sparse):
        pooled = self.tables(sparse)
        left = self.left(torch.cat([pooled[name] for name in self.shared], dim=1))
        right = self.right(torch.cat([pooled[name] for name in self.others], dim=1))
        return {"left": self.dropout(left), "right": right}

    def loss(self, outputs, labels):
        return (self.score(outputs) - labels).square().mean()

    def logits(self, outputs):
        return None

    def metrics(self, outputs, labels):
        return {"squared_error": (self.score(outputs) - labels).square(), "labels": labels}

    @staticmethod
    def score(outputs):
        return (outputs["left"] * outputs["right"]).sum(1)
