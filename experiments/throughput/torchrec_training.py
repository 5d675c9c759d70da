"""TorchRec's own models, trained the way TorchRec's users do, to compare with in `experiments.throughput`.

DLRM and DCN-v2 are those of `torchrec.models.dlrm`. TorchRec has no DeepFM as the paper has it: there the
network is this project's. All are under DistributedModelParallel, sharded by TorchRec's default planner.
FBGEMM's fused optimizer updates the tables, and autocast covers the forward pass alone.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import SGD
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from data import batch as ours
from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.config.schema import Config
from dlrm.models.build import build_model

CPU = torch.device("cpu")


class TorchRecTraining:
    """A model under TorchRec and its optimizers, under an open process group.

    Args:
        config: kind and shape of the network, precision, learning rates; tables and dense part by SGD.
        features: one table each.
        batch_size: samples of one rank in a step.
        device: of this rank.

    Raises:
        ValueError: `config` has optimizers other than SGD.
    """

    def __init__(
        self, config: Config, features: tuple[Feature, ...], batch_size: int, device: torch.device = CPU
    ) -> None:
        if (config.tables.optimizer, config.dense.optimizer) != ("sgd", "sgd"):
            raise ValueError("the comparison needs equal optimizers, and TorchRec's side has SGD")
        self._mixed = config.train.precision == "bf16"
        self._device = device
        network = _network(config, features, device)
        for module in network.modules():
            if isinstance(module, EmbeddingBagCollection):
                apply_optimizer_in_backward(SGD, module.parameters(), {"lr": config.tables.learning_rate})
        sharders: list[Any] = [EmbeddingBagCollectionSharder()]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
            batch_size=batch_size,
        )
        plan = planner.collective_plan(network, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(network, device=device, plan=plan, sharders=sharders)
        self.optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: SGD(parameters, lr=config.dense.learning_rate, fused=True),
        )

    def train(self, batches: Iterable[ours.Batch]) -> None:
        """Train on all batches in a plain loop."""
        for batch in _as_torchrec(batches):
            self.optimizer.zero_grad()
            loss, _ = self._forward(batch.to(self._device, non_blocking=True))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def train_pipelined(self, batches: Iterable[ours.Batch]) -> None:
        """Train under TorchRec's pipeline, which exchanges the ids of the next batch during a step."""
        pipeline = TrainPipelineSparseDist(
            self.model, self.optimizer, self._device, custom_model_fwd=self._forward
        )
        waiting = _as_torchrec(batches)
        while True:
            try:
                pipeline.progress(waiting)
            except StopIteration:
                return

    def _forward(self, batch: Batch | None) -> tuple[Tensor, Any]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed):
            loss, output = self.model(batch)
        return loss, output


def _network(config: Config, features: tuple[Feature, ...], device: torch.device) -> nn.Module:
    if config.model.kind not in {"dlrm", "dcnv2"}:
        return _WithLoss(build_model(config.model, features, DENSE_NAMES, torch.float32))
    tables = [
        EmbeddingBagConfig(
            name=f"table_{feature.name}",
            embedding_dim=config.model.embedding_dim,
            num_embeddings=feature.rows,
            feature_names=[feature.name],
        )
        for feature in features
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    layers = len(DENSE_NAMES), list(config.model.bottom_mlp), list(config.model.top_mlp)
    if config.model.kind == "dlrm":
        model = DLRM(collection, *layers, dense_device=device)
    else:
        crosses = config.model.cross_layers, config.model.cross_rank
        model = DLRM_DCN(collection, *layers, *crosses, dense_device=device)
    with_loss: nn.Module = DLRMTrain(model)
    return with_loss


class _WithLoss(nn.Module):
    """A click model of this project, in the form of TorchRec's `DLRMTrain`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and logits."""
        logits = self.model(batch.dense_features, batch.sparse_features)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def _as_torchrec(batches: Iterable[ours.Batch]) -> Iterator[Batch]:
    """Yield the same tensors as TorchRec's type of batch."""
    for batch in batches:
        yield Batch(dense_features=batch.dense, sparse_features=batch.sparse, labels=batch.labels)
