"""One worker of the exactness runs of `experiments.recovery`; started by torchrun, not by people.

It trains under `cpr.PartialRecovery` and writes down what it had and did: all rows with their optimizer state
at the moments that matter, the ids of the step that is interrupted, and a digest of every batch it finished.
The failure comes from `cpr.faults`, between the backward pass, in which rows change, and the exchange of
gradients.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr.faults import Injector, Plan
from cpr.recovery.run.policy import RecoveryPolicy
from cpr.session import PartialRecovery
from cpr.shards import dense_tensors, find_shards
from data.batch import Batch
from dlrm.config.recipe import load_config
from dlrm.dense_sync import AllReduceSync
from dlrm.launch.device import Ranks
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.build import shard
from dlrm.training.data import Inputs, prepare


@dataclass(frozen=True, kw_only=True)
class ExactnessJob:
    """What is trained, saved and interrupted."""

    folder: str
    """For checkpoints and notes."""
    plan: str
    """File with the failure; not `CPR_FAULTS`, which strikes between steps only."""
    overrides: tuple[str, ...]
    """Of the recipe `tiny`."""
    save_every_steps: int = 5
    killed_after_step: int = 8
    """The failure comes in the step after this one."""
    steps: int = 16
    """Steps in all."""


class Notes:
    """What this worker writes down.

    Args:
        folder: shared by all workers.
        generation: of the workers.
        rank: of this one.
    """

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        self._folder, self._generation, self._rank = folder, generation, rank

    def rows(self, moment: str, model: torch.nn.Module) -> None:
        """All rows of this rank with their optimizer state, and the dense parameters."""
        arrays = {
            f"{part.name}/{name}": column.detach().numpy()
            for part in find_shards(model)
            for name, column in part.columns.items()
        }
        arrays |= {f"dense/{name}": tensor.detach().numpy() for name, tensor in dense_tensors(model).items()}
        np.savez(self._folder / f"{moment}-{self._rank}.npz", **arrays)  # type: ignore[arg-type]

    def ids(self, batch: Batch) -> None:
        """Which rows the step on this batch touches."""
        features = {name: part.values().numpy() for name, part in batch.sparse.to_dict().items()}
        np.savez(self._folder / f"ids-{self._rank}.npz", **features)

    def finished(self, batch: Batch) -> None:
        """A step is complete."""
        line = json.dumps({"generation": self._generation, "digest": digest(batch)})
        with (self._folder / f"finished-{self._rank}.jsonl").open("a") as file:
            file.write(line + "\n")


def digest(batch: Batch) -> str:
    """Of the samples in a batch."""
    parts = (batch.dense, batch.sparse.values(), batch.labels)
    return sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def inputs_of(job: ExactnessJob, ranks: Ranks) -> Inputs:
    """What the run trains on."""
    return prepare(load_config("tiny", job.overrides), "tiny", ranks)


def train(job: ExactnessJob, recovery: PartialRecovery) -> None:
    """Train to the end of the job, writing everything down."""
    folder = Path(job.folder)
    recovery.init_process_group("gloo")
    worker_group = recovery.worker_group
    inputs = inputs_of(job, Ranks.from_environment())
    config = inputs.config
    with recovery.building():
        model = shard(inputs, initialize=False)
    optimizers = Optimizers(model, config.dense, config.tables, config.schedule)
    recovery.restore(model, optimizers.table_optimizers, {"optimizers": optimizers, "loader": inputs.loader})
    notes = Notes(folder, worker_group.generation, worker_group.rank)
    notes.rows(f"begin{worker_group.generation}", model)
    replicas = AllReduceSync(dense_parameters(model), num_scalars=1)
    injector = Injector(
        Plan.read(job.plan), folder=folder, num_ranks=worker_group.world_size, memory=recovery.memory_folder
    )
    for batch in islice(inputs.loader, recovery.batches_to_skip, None):
        step = recovery.steps_done
        if step == job.killed_after_step and worker_group.generation == 0:
            notes.ids(batch)
        optimizers.begin_step(step)
        loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        injector.step(step, worker_group.rank)
        replicas.average(torch.zeros(1))
        optimizers.step()
        recovery.step(config.data.global_batch_size)
        notes.finished(batch)
        if recovery.steps_done % job.save_every_steps == 0 and step < job.killed_after_step:
            recovery.checkpointer.wait()  # so that it is known which save is the newest
            notes.rows("saved", model)
        if recovery.steps_done == job.killed_after_step and worker_group.generation == 0:
            notes.rows("before", model)
            dist.barrier()  # all have written before one of them dies
        if recovery.steps_done == job.steps:
            break
    inputs.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Work off the job."""
    request = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    job = ExactnessJob(**request | {"overrides": tuple(request["overrides"])})
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    recovery = PartialRecovery(
        str(Path(job.folder) / "checkpoint"),
        save_every_steps=job.save_every_steps,
        moment="consistent",
        policy=RecoveryPolicy(max_lost_share=1.0),  # one worker of two may hold more than half
    )
    with recovery:
        train(job, recovery)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
