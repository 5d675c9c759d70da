"""The training job of `experiments.checkpointing`, shared by its launcher and its workers."""

import tempfile
from dataclasses import dataclass
from itertools import cycle

from cpr.checkpoint.config import CheckpointConfig
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.training.data import Inputs
from experiments.harness.training import Training
from experiments.harness.workload import TimedBatches, Workload, inputs_of


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Size of the model and of the measurements."""

    recipe: str = "terabyte"
    """Of `dlrm/recipes`; decides the network."""
    precision: str | None = None
    """`fp32`, or `bf16`: mixed precision; None: that of the recipe."""
    rows: int = 390_000
    """Rows of each table, with row-wise Adagrad; with 26 tables of 64 columns 2.6 GB in all."""
    num_tables: int = 26
    columns: int | None = None
    """Of each table; None: those of the recipe."""
    ids_per_sample: int | None = None
    """See `Workload`."""
    global_batch_size: int = 2048
    """Samples in a step, over all processes."""
    steps_before: int = 25
    """Steps before each save, and after it, whose median is the undisturbed step."""
    row_share: float = 1 / 8
    """Share of the rows of each table, drawn at random, that a row save writes."""
    ceiling_bytes: int = CheckpointConfig.host_memory_bytes
    """Limit of the extra host memory of a worker in a rolling save."""
    num_batches: int = 8
    """Different batches, used in turn."""
    seed: int = 1
    """Seed of batches and rows."""

    @property
    def table_bytes(self) -> int:
        """Size of all tables with a sum of row-wise Adagrad for each row, in fp32."""
        columns = load_config(self.recipe, []).model.embedding_dim if self.columns is None else self.columns
        return 4 * self.num_tables * self.rows * (columns + 1)


def start_training(job: TrainingJob, ranks: Ranks, initialize: bool = True) -> Training:
    """Set up the recipe of `job` with its tables, sharded table-wise."""
    inputs = training_inputs(job, ranks)
    return Training(inputs, cycle(list(inputs.loader)), initialize)


def training_inputs(job: TrainingJob, ranks: Ranks) -> Inputs:
    """Configuration and batches of a job."""
    workload = Workload(
        recipe=job.recipe,
        rows=job.rows,
        num_tables=job.num_tables,
        ids_per_sample=job.ids_per_sample,
        global_batch_size=job.global_batch_size,
        num_batches=job.num_batches,
        seed=job.seed,
    )
    batches = TimedBatches(workload, steps=workload.num_batches, rank=ranks.rank, world_size=ranks.world_size)
    overrides = [
        "train.device=cpu",
        f"train.run_folder={tempfile.gettempdir()}",
        f"data.global_batch_size={job.global_batch_size}",
        "tables.optimizer=rowwise_adagrad",
        "sharding.strategy=torchrec",
        'sharding.kinds=["table_wise"]',
        "sharding.data_parallel_rows=0",
    ]
    if job.precision is not None:
        overrides.append(f"train.precision={job.precision}")
    if job.columns is not None:
        *hidden, _ = load_config(workload.recipe, []).model.bottom_mlp
        overrides += [f"model.embedding_dim={job.columns}", f"model.bottom_mlp={[*hidden, job.columns]}"]
    config = load_config(workload.recipe, overrides)
    return inputs_of(config, workload.recipe, ranks, workload.features, batches)
