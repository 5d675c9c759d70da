"""One emulated run: training that loses nodes and restores their rows from real saves.

Saving, choosing rows and loading use the code of real recovery: `Checkpointer`, `Prioritizer`,
`Checkpointer.load_shards` for the lost rows, `pls_added`. The rows of a failed node are overwritten with NaN
first, so that a row that was not restored ends the run.
"""

import json
import logging
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.priority import Prioritizer, PriorityConfig
from cpr.priority.config import Scheme
from cpr.recovery.restore.pls_budget import pls_added
from cpr.recovery.run.progress import Charge
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.metrics import ClickMetrics
from dlrm.training.build import start_process_group
from dlrm.training.data import Inputs, prepare
from experiments.emulation.data import SLICES, Ids, prioritised_tables, skewed_dataset, slice_of
from experiments.emulation.emulation import (
    NODES,
    PRIORITY,
    JobEvent,
    Run,
    events_of,
    rows_of_node,
    step_at,
    step_saved,
)
from experiments.harness.training import Training

LEARNING_RATES: Final = {"rowwise_adagrad": (0.01, 0.02), "adagrad": (0.05, 0.02), "sgd": (10.0, 0.2)}
"""Learning rates of tables and of dense parameters, by the tables' optimizer: the best of a few on the
default data set. Larger ones gain SGD 0.003 of AUC, but then two runs that hardly differ end 0.0005 apart."""
WARMUP_STEPS: Final = 100
"""Steps over which the learning rates rise. Without warm-up, chance in the first steps decides where training
ends: a failure in the first hour, when nothing is there to lose, moved the AUC by 0.002, up or down."""
DENSE_OPTIMIZERS: Final = {"rowwise_adagrad": "adagrad", "adagrad": "adagrad", "sgd": "sgd"}
MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class EmulatedWorkload:
    """Data, batch size and number of steps that all runs of an experiment share."""

    dataset: str
    """Prepared data; its last day is for testing."""
    batch_size: int = 1024
    max_steps: int = 0
    """0: one epoch."""
    covering: float
    """Share of all rows that the prioritised tables hold, see `PriorityConfig`."""


def start() -> None:
    """Prepare this process for runs: one thread, and a process group of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that hands out the runs
    for library in ("torchrec", "torch.fx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # of libraries, at every start
    torch.set_num_threads(1)
    keep_freed_memory()
    start_process_group(Ranks(0, 0, 1), torch.device("cpu"))


def emulate(run: Run, workload: EmulatedWorkload) -> dict[str, Any]:
    """Train from the first step to the last, with the failures of the run, and test.

    Needs an open process group of one rank.

    Returns:
        Of the run: `steps`, `pls`, `saves` besides the one at step 0 and the `rows_saved` by them, `auc` and
        `log_loss` on the test day, `auc_head` and so on by how common the ids of a sample are, `seconds`.
    """
    began = perf_counter()
    inputs = prepare(_config(run, workload), "tiny", Ranks(0, 0, 1))
    try:
        ids = Ids(inputs.manifest.features)
        training = Training(inputs, ids.training(inputs.loader))
        num_steps = min(len(inputs.loader), workload.max_steps or len(inputs.loader))
        with _emulated_nodes(run, training, workload, num_steps) as nodes:
            for event in events_of(run):
                training.timed_steps(step_at(event.hour, num_steps) - training.steps_done)
                nodes.play(event)
            training.timed_steps(num_steps - training.steps_done)
            outcome = {
                "steps": num_steps,
                "pls": nodes.pls,
                "saves": nodes.num_saves,
                "rows_saved": nodes.num_rows_saved,
            }
        tested = _test(training.model, ids, inputs, workload)
    finally:
        inputs.close()
    return {**outcome, **tested, "seconds": perf_counter() - began}


class EmulatedNodes:
    """The logical nodes of a run: saves their rows, and loses and restores those of nodes that fail.

    Args:
        run: decides which rows are saved, and when.
        training: shared by all nodes.
        folder: of the checkpoint.
        workload: decides batch size and which tables are prioritised.
        num_steps: of the whole run.
    """

    def __init__(
        self, run: Run, training: Training, folder: Path, workload: EmulatedWorkload, num_steps: int
    ) -> None:
        self.pls = 0.0
        self.num_saves = self.num_rows_saved = 0
        self._run, self._training = run, training
        self._num_steps, self._batch_size = num_steps, workload.batch_size
        self._charges: dict[int, Charge] = {}
        """The last loss of each node: a node that fails again loses only the samples since."""
        optimizers = training.optimizers.table_optimizers
        self._checkpointer = Checkpointer(training.model, CheckpointConfig(uri=str(folder)), optimizers)
        self._prioritizer: Prioritizer | None = None
        if run.scheme in PRIORITY:
            priority = PriorityConfig(
                scheme=cast("Scheme", run.scheme),
                ratio=run.ratio,
                sampling_period=run.sampling_period,
                covering=workload.covering,
                seed=run.seed,
            )
            self._prioritizer = Prioritizer(
                training.model, priority, optimizers, shards=self._checkpointer.shards
            )
        if self._prioritizer is not None:
            self._prioritizer.begin_full_save()
        self._save_all()
        if self._prioritizer is not None:
            self._prioritizer.confirm()

    def play(self, event: JobEvent) -> None:
        """Save, or lose nodes and restore their rows."""
        if event.nodes:
            self._fail(event)
        else:
            self._save()

    def close(self) -> None:
        """End the background work."""
        if self._prioritizer is not None:
            self._prioritizer.close()
        self._checkpointer.close()

    def _save(self) -> None:
        self.num_saves += 1
        if self._prioritizer is None:
            self.num_rows_saved += sum(shard.num_rows for shard in self._checkpointer.shards)
            self._save_all()
            return
        rows = self._prioritizer.rows_to_save()
        self.num_rows_saved += sum(map(len, rows.values()))
        self._checkpointer.save_rows(rows)
        self._checkpointer.wait()
        self._prioritizer.confirm()

    def _save_all(self) -> None:
        self._checkpointer.save("consistent")
        self._checkpointer.wait()

    @torch.no_grad()
    def _fail(self, event: JobEvent) -> None:
        lost: dict[str, list[tuple[int, int]]] = {}
        for shard in self._checkpointer.shards:
            ranges = [rows_of_node(node, shard.num_rows) for node in event.nodes]
            lost[shard.name] = [(begin, end) for begin, end in ranges if begin < end]
        for values in self._values(lost):
            values.fill_(torch.nan)
        self._checkpointer.load_shards([name for name in lost if lost[name]], lost)
        if not all(values.isfinite().all() for values in self._values(lost)):
            raise RuntimeError(f"not all rows of the nodes {event.nodes} came back from the save")
        if self._prioritizer is not None:
            for name, gone in lost.items():
                self._prioritizer.forget(name, gone)
        self._charge(event)

    def _values(self, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[Tensor]:
        """Weights and optimizer state of these rows in memory."""
        for shard in self._checkpointer.shards:
            for begin, end in ranges[shard.name]:
                yield from shard.narrow(begin, end).columns.values()

    def _charge(self, event: JobEvent) -> None:
        done = self._training.steps_done * self._batch_size
        saved = step_saved(self._run, event.hour, self._num_steps) * self._batch_size
        total = self._num_steps * self._batch_size
        added = pls_added(dict.fromkeys(event.nodes, 1.0), done, saved, total, NODES, self._charges.values())
        assert added is not None, "the number of samples is known"
        self.pls += added
        for node in event.nodes:
            self._charges[node] = Charge(world_size=NODES, rank=node, share=1.0, begin=saved, end=done)


@contextmanager
def _emulated_nodes(
    run: Run, training: Training, workload: EmulatedWorkload, num_steps: int
) -> Iterator[EmulatedNodes]:
    parent = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="cpr-emulation-", dir=parent) as folder:
        nodes = EmulatedNodes(run, training, Path(folder) / "checkpoint", workload, num_steps)
        try:
            yield nodes
        finally:
            nodes.close()


def _config(run: Run, workload: EmulatedWorkload) -> Any:
    tables, dense = LEARNING_RATES[run.optimizer]
    dataset = Path(workload.dataset)
    if run.top_coverage is not None:
        dataset = skewed_dataset(dataset, run.top_coverage)
    settings = {
        "data.uri": json.dumps(str(dataset)),
        "data.global_batch_size": workload.batch_size,
        "model.kind": run.network,
        "tables.optimizer": run.optimizer,
        "tables.learning_rate": tables,
        "dense.optimizer": DENSE_OPTIMIZERS[run.optimizer],
        "dense.learning_rate": dense,
        "schedule.warmup_steps": WARMUP_STEPS,
        "train.seed": run.seed,
        "train.device": "cpu",
        "train.precision": "fp32",
        "model.cross_layers": 2,
        "model.cross_rank": 64,
    }
    return load_config("tiny", [f"{name}={value}" for name, value in settings.items()])


@torch.no_grad()
def _test(model: nn.Module, ids: Ids, inputs: Inputs, workload: EmulatedWorkload) -> dict[str, float | None]:
    """AUC and log loss on the test day, and the AUC of each slice of it."""
    tables = prioritised_tables(inputs.manifest.features, workload.covering)
    logits, labels, familiarity = [], [], []
    model.eval()
    for batch, seen in ids.testing(inputs.test_loader, tables):
        valid = slice(batch.num_valid)
        logits.append(model(batch.dense, batch.sparse)[valid])
        labels.append(batch.labels[valid])
        familiarity.append(seen[valid])
    scores, clicks, slices = torch.cat(logits), torch.cat(labels), slice_of(torch.cat(familiarity))
    whole = _metrics(scores, clicks)
    parts = {
        f"auc_{name}": _metrics(scores[slices == number], clicks[slices == number]).auc
        for number, name in enumerate(SLICES)
    }
    return {"auc": whole.auc, "log_loss": whole.log_loss, **parts}


def _metrics(scores: Tensor, clicks: Tensor) -> Any:
    metrics = ClickMetrics(scores.device)
    metrics.update(scores, clicks)
    return metrics.compute()
