"""A training script in TorchRec's own style that survives failures of its workers with `cpr`.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrec_style.py --checkpoint /tmp/style

Kill a worker (`kill -9`) while it runs: training continues. The lines that were added, or changed for it, are
marked so: `# +`. With `--pipeline`, `TrainPipelineSparseDist` runs the steps. Each rank writes what it
trained on, and digests of its tables, to `--journal FOLDER` as JSON lines.
"""

import argparse
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

import cpr  # +

ROWS = {"user": 2000, "item": 3000, "shop": 500, "day": 7}
DIM = 16
BATCH = 32


@dataclass
class ClickBatch(Pipelineable):  # type: ignore[misc]  # TorchRec has no types
    """A batch of one rank."""

    number: int
    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same samples on a device."""
        return type(self)(
            self.number,
            self.features.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """The samples are used on a stream."""
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Self:
        """The same samples in page-locked memory."""
        return type(self)(self.number, self.features.pin_memory(), self.labels.pin_memory())


def batches(rank: int) -> Iterator[ClickBatch]:
    """Endless batches 0, 1, 2, ... of a rank, the same in each run."""
    for number in count():
        random = torch.Generator().manual_seed(1_000_003 * rank + number)
        values = [torch.randint(rows, (BATCH,), generator=random) for rows in ROWS.values()]
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=list(ROWS),
            values=torch.cat(values),
            lengths=torch.ones(BATCH * len(ROWS), dtype=torch.int64),
        )
        yield ClickBatch(number, features, (values[0] % 2).float())


class TwoTowers(nn.Module):
    """Embedding bags and a small dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
                for name, rows in ROWS.items()
            ],
        )
        self.dense = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, int]]:
        """Loss, and (loss, number of the batch) for the caller of the pipeline."""
        logits = self.dense(self.ebc(batch.features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), batch.number)


def build() -> tuple[nn.Module, KeyedOptimizerWrapper]:
    """The sharded model and the optimizer of its dense part."""
    torch.manual_seed(0)
    model = TwoTowers()
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.05})
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder()]
    )
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))


def train_steps(
    model: nn.Module, optimizer: KeyedOptimizerWrapper, data: Iterator[ClickBatch], pipelined: bool
) -> Iterator[int]:
    """Train on all batches; yields the number of each once it is done."""
    if pipelined:
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        while True:
            try:
                yield pipeline.progress(data)[1]
            except StopIteration:
                return
    for batch in data:
        optimizer.zero_grad()
        loss, (_, number) = model(batch)
        loss.backward()
        optimizer.step()
        yield number


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--checkpoint", required=True, help="directory of the checkpoints")
    parser.add_argument("--batches", type=int, default=200, help="of each rank")
    parser.add_argument("--save-every-steps", type=int, default=20)
    parser.add_argument("--pipeline", action="store_true", help="use TrainPipelineSparseDist")
    parser.add_argument("--pause-s", type=float, default=0.05, help="after each step, to watch")
    parser.add_argument("--journal", type=Path, help="folder for JSON lines, one file a rank")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("cpr").setLevel(logging.INFO)

    samples = BATCH * int(os.environ["WORLD_SIZE"])
    total, every = options.batches * samples, options.save_every_steps
    recovery = cpr.PartialRecovery(options.checkpoint, save_every_steps=every, total_samples=total)  # +
    with recovery:  # +
        recovery.init_process_group("gloo")  # + instead of dist.init_process_group("gloo")
        with recovery.building():  # +
            model, optimizer = build()
        recovery.restore(model, optimizers=[optimizer])  # +
        journal = Journal(options.journal, model)
        journal.write("begin", **recovery.recoveries[-1].to_dict())
        data = islice(batches(dist.get_rank()), recovery.batches_done, options.batches)  # + instead of 0
        for number in train_steps(model, optimizer, data, options.pipeline):
            recovery.step(samples)  # +
            journal.write("step", step=recovery.steps_done, batch=number)
            time.sleep(options.pause_s)
    journal.write("end", step=recovery.steps_done, pls=recovery.pls)
    dist.destroy_process_group()


class Journal:
    """Writes events of this rank with digests of its model to `folder`, or nothing if that is None."""

    def __init__(self, folder: Path | None, model: nn.Module) -> None:
        self._model = model
        self._path = folder / f"rank{dist.get_rank()}.jsonl" if folder else None

    def write(self, event: str, **more: object) -> None:
        """Append a line."""
        if self._path is None:
            return
        line = {"event": event, "pid": os.getpid(), "digest": self._digest(), **more}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _digest(self) -> str:
        """Digest of the weights and optimizer state of all tables on this rank, and of the dense part."""
        model: Any = self._model
        state = hashlib.sha256()
        optimizer = model.fused_optimizer.state_dict()["state"]
        values = [*model.state_dict().values(), *(v for each in optimizer.values() for v in each.values())]
        for value in values:
            tensors = (
                [shard.tensor for shard in value.local_shards()]
                if isinstance(value, ShardedTensor)
                else [value]
            )
            for tensor in tensors:
                state.update(tensor.detach().contiguous().numpy().tobytes())
        return state.hexdigest()


if __name__ == "__main__":
    main()
