"""Builds the model that a configuration names."""

from collections.abc import Sequence

import torch
from torch import nn

from data.dataset import Feature
from dlrm.config.schema import ModelConfig
from dlrm.models.dcn import DCNv2
from dlrm.models.deepfm import DeepFM
from dlrm.models.dlrm import DLRM
from dlrm.models.fm import FactorizationMachine, LogisticRegression


def build_model(
    config: ModelConfig, features: Sequence[Feature], num_dense: int, dtype: torch.dtype
) -> nn.Module:
    """Build the model of `config.kind`, its tables on the meta device and its dense part on the CPU.

    `features` are in canonical order, one table each. `dtype` is that of the arithmetic, float32 or bfloat16
    (mixed precision); parameters are fp32.
    """
    dim = config.embedding_dim
    if config.kind == "lr":
        return LogisticRegression(features, num_dense)
    if config.kind == "fm":
        return FactorizationMachine(features, num_dense, dim, dtype)
    if config.kind == "deepfm":
        return DeepFM(features, num_dense, dim, config.top_mlp, dtype)
    if config.kind == "dcnv2":
        return DCNv2(config, features, num_dense, dtype)
    return DLRM(config, features, num_dense, dtype)
