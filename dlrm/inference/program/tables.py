"""Whole tables in plain PyTorch, in place of TorchRec's collections: fp32 rows, or int8 rows.

An int8 row is 8-bit codes with a scale and an offset of its own, as in FBGEMM's row-wise quantization: its
largest rounding error is 1/510 of the range of its values. Tables of one or two columns, which that would
make larger, keep fp32 rows. A dynamic table keeps the sorted ids of its rows, and finds an id by binary
search; an id without a row adds nothing, as in training.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

RowFormat = Literal["fp32", "int8"]
LEVELS: Final = 255
"""Steps between the least and the greatest value of an int8 row."""
SCALE_BYTES: Final = 8
"""Scale and offset of an int8 row."""


class Rows(nn.Module):
    """The rows of one table.

    Args:
        num_rows: of the table.
        dim: columns.
        rows: how rows are stored, where int8 is smaller.
        ids: of a dynamic table, int64 `[num_rows]`, ascending; None: ids are rows.
    """

    ids: Tensor
    values: Tensor
    codes: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, num_rows: int, dim: int, rows: RowFormat, ids: Tensor | None = None) -> None:
        super().__init__()
        self.num_rows, self.dim = num_rows, dim
        self.is_int8, self.is_dynamic = _is_int8(dim, rows), ids is not None
        stored = num_rows + self.is_dynamic  # the last row of a dynamic table is zero
        if ids is not None:
            self.register_buffer("ids", ids)
        if self.is_int8:
            self.register_buffer("codes", torch.zeros(stored, dim, dtype=torch.uint8))
            self.register_buffer("scale", torch.zeros(stored, 1))
            self.register_buffer("offset", torch.zeros(stored, 1))
        else:
            self.register_buffer("values", torch.zeros(stored, dim))

    @staticmethod
    def num_bytes(num_rows: int, dim: int, rows: RowFormat) -> int:
        """Bytes of a table with as many rows."""
        return num_rows * (dim + SCALE_BYTES if _is_int8(dim, rows) else 4 * dim)

    def fill(self, places: slice | Tensor, rows: Tensor) -> None:
        """Set rows, fp32 `[n, dim]`."""
        if not self.is_int8:
            self.values[places] = rows
            return
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = (high - low) / LEVELS
        steps = (rows - low) / scale.where(scale > 0, 1)
        self.codes[places] = steps.round().clamp(0, LEVELS).to(torch.uint8)
        self.scale[places], self.offset[places] = scale, low

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of ids int64 `[N]`, fp32 `[N, dim]`."""
        places = self._places(ids)
        if not self.is_int8:
            return functional.embedding(places, self.values)
        codes = functional.embedding(places, self.codes).to(torch.float32)
        return codes * functional.embedding(places, self.scale) + functional.embedding(places, self.offset)

    def pooled(self, bags: JaggedTensor, pooling: PoolingType, weights: Tensor | None) -> Tensor:
        """Sum or mean of the rows of each bag, fp32 `[B, dim]`, with weights `[N]` if given."""
        ids = bags.values()
        if self.is_int8:
            places, table = torch.arange(ids.shape[0], device=ids.device), self(ids)
        else:
            places, table = self._places(ids), self.values
        sums = functional.embedding_bag(
            places,
            table,
            bags.offsets(),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=weights,
        )
        if pooling == PoolingType.MEAN:
            sums = sums / bags.lengths().clamp(min=1).unsqueeze(1)
        return sums

    def _places(self, ids: Tensor) -> Tensor:
        if not self.is_dynamic:
            return ids
        places = torch.searchsorted(self.ids, ids).clamp(max=self.num_rows - 1)
        return torch.where(self.ids[places] == ids, places, self.num_rows)


def _is_int8(dim: int, rows: RowFormat) -> bool:
    return rows == "int8" and dim + SCALE_BYTES < 4 * dim


class PooledTables(nn.Module):
    """Replaces an `EmbeddingBagCollection`."""

    def __init__(self, collection: EmbeddingBagCollection, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._configs = collection.embedding_bag_configs()
        self._names = [*collection._embedding_names]
        self._is_weighted = collection.is_weighted()
        self.rows = nn.ModuleList(rows[config.name] for config in self._configs)

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of all features."""
        bags: Mapping[str, JaggedTensor] = sparse.to_dict()
        pooled = []
        for config, rows in zip(self._configs, self.rows, strict=True):
            for feature in config.feature_names:
                weights = bags[feature].weights() if self._is_weighted else None
                pooled.append(rows.pooled(bags[feature], config.pooling, weights))  # type: ignore[operator]
        return KeyedTensor.from_tensor_list(self._names, pooled)


class SequenceTables(nn.Module):
    """Replaces an `EmbeddingCollection`."""

    def __init__(self, collection: EmbeddingCollection, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._configs = collection.embedding_configs()
        self._names: Sequence[Sequence[str]] = collection.embedding_names_by_table()
        self.rows = nn.ModuleList(rows[config.name] for config in self._configs)

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of all ids, by feature."""
        bags: Mapping[str, JaggedTensor] = sparse.to_dict()
        found = {}
        for config, names, rows in zip(self._configs, self._names, self.rows, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                bag = bags[feature]
                found[name] = JaggedTensor(rows(bag.values()), lengths=bag.lengths(), offsets=bag.offsets())
        return found


def collections_of(model: nn.Module) -> dict[str, Any]:
    """TorchRec's collections in a model that is not sharded, by path."""
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def table_names(path: str, collection: Any) -> Iterable[tuple[str, Any]]:
    """Fully qualified name and config of each table of a collection at a path."""
    pooled = isinstance(collection, EmbeddingBagCollection)
    kind = "embedding_bags" if pooled else "embeddings"
    for config in collection.embedding_bag_configs() if pooled else collection.embedding_configs():
        yield f"{path}.{kind}.{config.name}".lstrip("."), config


def replace_collection(model: nn.Module, path: str, collection: Any, rows: Mapping[str, Rows]) -> None:
    """Put whole tables, by name, in the place of a collection."""
    is_pooled = isinstance(collection, EmbeddingBagCollection)
    replaced = (PooledTables if is_pooled else SequenceTables)(collection, rows)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, replaced)
