"""Sum-pooled embedding tables, one per feature, and their names."""

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from data.dataset import Feature

PREFIXES: Final = ("linear_", "first_", "cross_")
"""How the names of a feature's other tables begin: of the linear part, and of split operators."""
NOT_IN_NAMES: Final = frozenset("./%")
"""Characters that separate modules or folders, and the one that starts an escape."""
_MODULES: Final = nn.ModuleDict()


def table_name(prefix: str, feature: str) -> str:
    """Name of a table of a feature: different for each prefix and feature.

    It is the name of a module and, in a save, part of a folder's name: what these cannot hold is escaped as
    in URLs (`%2E`). So is the first letter of a name that PyTorch's `ModuleDict` has as an attribute
    (`items`, `type`), or that another table of a feature could have.
    """
    name = prefix + "".join(map(_escaped, feature))
    if hasattr(_MODULES, name) or (not prefix and name.startswith(PREFIXES)):
        return f"%{ord(name[0]):02X}{name[1:]}"
    return name


def _escaped(character: str) -> str:
    if character.isprintable() and character not in NOT_IN_NAMES:
        return character
    return "".join(f"%{byte:02X}" for byte in character.encode())


def pooled_tables(
    rows: Mapping[str, int],
    dim: int,
    prefix: str,
    bound: float | None = None,
    *,
    is_weighted: bool = False,
) -> EmbeddingBagCollection:
    """One sum-pooled table on the meta device for each feature, with its rows; `prefix` is of its name.

    Initial values are uniform in +-`bound`; None: in +-1 / sqrt(rows). With `is_weighted`, rows are
    multiplied by the weights of their ids before they are summed.
    """
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        is_weighted=is_weighted,
        tables=[
            EmbeddingBagConfig(
                name=table_name(prefix, name),
                embedding_dim=dim,
                num_embeddings=num_rows,
                feature_names=[name],
                pooling=PoolingType.SUM,
                weight_init_min=None if bound is None else -bound,
                weight_init_max=bound,
            )
            for name, num_rows in rows.items()
        ],
    )


class PooledFeatures(nn.Module):
    """One sum-pooled table of `dim` columns per feature, looked up together; output in `dtype`.

    The tables are on the meta device: sharding allocates them, and `dlrm.sharding.tables` sets their initial
    values.
    """

    initial_bound: ClassVar[float | None] = None
    """Initial values of the tables are uniform in +- this; None: in +-1 / sqrt(rows), as in
    facebookresearch/dlrm and TorchRec."""

    def __init__(self, features: Sequence[Feature], dim: int, dtype: torch.dtype, prefix: str = "") -> None:
        super().__init__()
        rows = {feature.name: feature.rows for feature in features}
        # TorchRec weights all features of a collection or none; those without weights have ones
        is_weighted = any(feature.weights for feature in features)
        self.tables = pooled_tables(rows, dim, prefix, self.initial_bound, is_weighted=is_weighted)
        self.names = [feature.name for feature in features]
        self.dtype = dtype

    def pooled(self, sparse: KeyedJaggedTensor) -> tuple[Tensor, list[str]]:
        """Pooled embeddings `[B, F * dim]`, and the features' names in the order of its columns."""
        pooled: KeyedTensor = self.tables(sparse)
        return pooled.values().to(self.dtype), pooled.keys()

    def in_order(self, sparse: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings `[B, F, dim]` in canonical order, whatever order sharding returns."""
        return ordered(*self.pooled(sparse), self.names)


@torch.fx.wrap  # so that TorchRec's pipelines can trace a model
def ordered(values: Tensor, names: list[str], wanted: list[str]) -> Tensor:
    """Pooled embeddings `[B, F * dim]` of features `names` as `[B, F, dim]` in the order `wanted`."""
    pooled: Tensor = values.view(values.shape[0], len(names), values.shape[1] // len(names))
    if names == wanted:
        return pooled
    return pooled.index_select(1, _places(tuple(names), tuple(wanted), pooled.device))


@functools.cache  # a copy to a GPU in each step would wait for it
def _places(names: tuple[str, ...], wanted: tuple[str, ...], device: torch.device) -> Tensor:
    """Index in `names` of each wanted name, int64 `[F]`."""
    return torch.tensor([names.index(name) for name in wanted], device=device)
