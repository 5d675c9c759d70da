"""A small network that writes down which records it has trained, for runs whose workers are killed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dlrm.models.contract import ModelInputs

RECORD: Final = "record"
"""Feature whose id is the number of the record."""


class LogisticRegression(nn.Module):
    """Logistic regression over dense values and pooled embeddings; takes no options."""

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"{feature.name}_table",
                embedding_dim=inputs.embedding_dim,
                num_embeddings=feature.rows,
                feature_names=[feature.name],
            )
            for feature in inputs.features
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.names = [feature.name for feature in inputs.features]
        self.top = nn.Linear(len(inputs.dense) + len(self.names) * inputs.embedding_dim, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits `[B]`."""
        pooled = self.tables(sparse)
        vectors = [pooled[name].float() for name in self.names]
        logits: Tensor = self.top(torch.cat([dense, *vectors], dim=1)).squeeze(1)
        return logits


class Recording(LogisticRegression):
    """Logistic regression with a file of the records of each forward pass.

    A process appends a line for each forward pass in training, with the numbers of the records of its
    batch, to the file `GENERATION-RANK` in the folder `model.options.folder`.
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__(options, inputs)
        self._folder, self._file = Path(options["folder"]), -1

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits `[B]`."""
        is_trial = isinstance(self.tables, EmbeddingBagCollection)  # which is tried before it is sharded
        if self.training and not is_trial:
            self._note(sparse[RECORD].values().tolist())
        return super().forward(dense, sparse)

    def _note(self, records: list[int]) -> None:
        if self._file < 0:
            name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._file, f"{' '.join(map(str, records))}\n".encode())
