"""Sum-pooled embedding tables, one per feature."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from data.dataset import Feature


def pooled_tables(rows: Mapping[str, int], dim: int, prefix: str) -> EmbeddingBagCollection:
    """One sum-pooled table on the meta device for each feature, with its rows; `prefix` is of names."""
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"{prefix}{name}",
                embedding_dim=dim,
                num_embeddings=num_rows,
                feature_names=[name],
                pooling=PoolingType.SUM,
            )
            for name, num_rows in rows.items()
        ],
    )


class PooledFeatures(nn.Module):
    """One sum-pooled table of `dim` columns per feature, looked up together; output in `dtype`.

    The tables are on the meta device: sharding allocates them, with initial values uniform in +-1 /
    sqrt(rows) as in facebookresearch/dlrm (TorchRec's default).
    """

    def __init__(self, features: Sequence[Feature], dim: int, dtype: torch.dtype, prefix: str = "") -> None:
        super().__init__()
        self.tables = pooled_tables({feature.name: feature.rows for feature in features}, dim, prefix)
        self.names = [feature.name for feature in features]
        self.dtype = dtype

    def pooled(self, sparse: KeyedJaggedTensor) -> tuple[Tensor, list[str]]:
        """Pooled embeddings `[B, F * dim]`, and the features' names in the order of its columns."""
        pooled: KeyedTensor = self.tables(sparse)
        return pooled.values().to(self.dtype), pooled.keys()

    def in_order(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings `[B, F, dim]` in canonical order, whatever order sharding returns."""
        values, names = self.pooled(sparse)
        pooled: Tensor = values.view(values.shape[0], len(names), values.shape[1] // len(names))
        if names == self.names:
            return pooled
        places = torch.tensor([names.index(name) for name in self.names], device=pooled.device)
        return pooled.index_select(1, places)
