"""The counterparts of the models in public libraries, unsharded, each with its library's own initial values.

TorchRec has DLRM and DCN-v2 (`torchrec.models.dlrm`). DeepCTR-Torch has DeepFM, which without its deep part
is a factorization machine with a linear part; its Wide & Deep without the deep part is logistic regression.
Its L2 regularization (1e-5 by default) is off, as ours have none.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.config.schema import ModelConfig

LIBRARIES: Final = {
    "dlrm": "torchrec",
    "dcnv2": "torchrec",
    "deepfm": "deepctr-torch",
    "fm": "deepctr-torch",
    "lr": "deepctr-torch",
}
"""Library of each model's counterpart."""
LARGEST_EXACT: Final = 2**24
"""DeepCTR-Torch passes ids as fp32."""


@dataclass(frozen=True, kw_only=True)
class ReferenceData:
    """What a reference needs to know of the data."""

    features: Sequence[Feature]
    num_dense: int
    longest: Mapping[str, int]
    """Longest bag of each feature with bags of other sizes than 1."""


def build_reference(config: ModelConfig, data: ReferenceData, seed: int) -> nn.Module:
    """Build the counterpart of `config.kind`: from dense `[B, num_dense]` and `B` bags to logits `[B]`."""
    torch.manual_seed(seed)
    if LIBRARIES[config.kind] == "torchrec":
        return _TorchRec(config, data)
    return _DeepCTR(config, data, seed)


def check_features(features: Sequence[Feature]) -> None:
    """Refuse data that DeepCTR-Torch does not take.

    Raises:
        ValueError: names the feature.
    """
    for feature in features:
        if feature.weights:
            raise ValueError(
                f"feature {feature.name} has weights, which DeepCTR-Torch does not take: leave it out"
            )
        if not 0 < feature.rows <= LARGEST_EXACT:
            raise ValueError(
                f"ids of feature {feature.name} may be {LARGEST_EXACT:,} or more, and DeepCTR-Torch rounds "
                "them to fp32: prepare the data with another rule for ids, or fewer rows"
            )


def tables_of(reference: nn.Module) -> list[nn.Parameter]:
    """Parameters of a reference that are embedding tables, those of its linear part included."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = (module for module in reference.modules() if isinstance(module, tables))
    return [cast("nn.Parameter", module.weight) for module in found]


class _TorchRec(nn.Module):
    def __init__(self, config: ModelConfig, data: ReferenceData) -> None:
        super().__init__()
        tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table_{place}",
                    embedding_dim=config.embedding_dim,
                    num_embeddings=feature.rows,
                    feature_names=[feature.name],
                )
                for place, feature in enumerate(data.features)
            ]
        )
        shape = (tables, data.num_dense, list(config.bottom_mlp), list(config.top_mlp))
        self.model = (
            DLRM_DCN(*shape, config.cross_layers, config.cross_rank)
            if config.kind == "dcnv2"
            else DLRM(*shape)
        )

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.model(dense, sparse)
        return logits.squeeze(1)


class _DeepCTR(nn.Module):
    """A model of DeepCTR-Torch, which takes all its inputs as columns of one fp32 matrix."""

    def __init__(self, config: ModelConfig, data: ReferenceData, seed: int) -> None:
        super().__init__()
        library = _import_deepctr()
        self._longest = data.longest
        columns: list[Any] = []
        for place, feature in enumerate(data.features):
            # not by the features' own names, as these become names of modules
            column = library.SparseFeat(f"feature {place}", feature.rows, config.embedding_dim)
            if feature.name in data.longest:
                longest, length = data.longest[feature.name], f"length {place}"
                column = library.VarLenSparseFeat(column, longest, "sum", length)
            columns.append(column)
        columns += [library.DenseFeat(f"dense {place}") for place in range(data.num_dense)]
        usual = {
            "task": "regression",  # logits
            "seed": seed,
            "l2_reg_linear": 0,
            "l2_reg_embedding": 0,
        }
        if config.kind == "lr":
            self.model = library.WDL(columns, [], **usual)
        else:
            deep = config.top_mlp[:-1] if config.kind == "deepfm" else ()
            self.model = library.DeepFM(columns, columns, dnn_hidden_units=deep, **usual)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        columns: list[Tensor] = []
        for name in sparse.keys():  # noqa: SIM118  # no dict
            bags = sparse[name]
            # padding samples of an evaluation may have no id
            columns.append(bags.to_padded_dense(self._longest.get(name, 1)))
            if name in self._longest:
                columns.append(bags.lengths().unsqueeze(1))
        inputs = torch.cat([*(column.float() for column in columns), dense], dim=1)
        logits: Tensor = self.model(inputs)
        return logits.squeeze(1)


class _DeepCTRNames:
    """What is used of DeepCTR-Torch, which has no types."""

    def __init__(self) -> None:
        from deepctr_torch import inputs, models  # noqa: PLC0415  # see `_import_deepctr`

        self.SparseFeat: Any = inputs.SparseFeat
        self.VarLenSparseFeat: Any = inputs.VarLenSparseFeat
        self.DenseFeat: Any = inputs.DenseFeat
        self.DeepFM: Any = models.DeepFM
        self.WDL: Any = models.WDL


def _import_deepctr() -> _DeepCTRNames:
    """Import DeepCTR-Torch without the thread by which it asks the network for a newer version."""
    with mock.patch.object(threading.Thread, "start"):
        return _DeepCTRNames()
