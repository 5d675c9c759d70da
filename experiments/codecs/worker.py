"""One worker of one seed of `experiments.codecs`; started by torchrun, not by people.

Reads its job as JSON from the command line; rank 0 writes what it measured as JSON to the job's `out`.
The batches stay in memory, so that every codec's run goes on with the same ones.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.training.build import start_process_group
from dlrm.training.data import prepare
from dlrm.training.evaluation import evaluate
from experiments.codecs.run import EXACT, LOSSY, Job
from experiments.harness.training import Training


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one seed."""
    request = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    measured = _measure(Job(**request["job"]), Path(request["scratch"]), ranks)
    dist.destroy_process_group()
    if ranks.rank == 0:
        Path(request["out"]).write_text(json.dumps(measured))
    return 0


def _measure(job: Job, scratch: Path, ranks: Ranks) -> dict[str, Any]:
    """AUC, and what the save says of itself, for each codec."""
    overrides = [
        f"data.uri={json.dumps(job.dataset)}",
        f"train.seed={job.seed}",
        f"train.run_folder={json.dumps(str(scratch))}",
        "train.device=cpu",
    ]
    inputs = prepare(load_config("tiny", overrides), "tiny", ranks)
    try:
        batches = list(inputs.loader)[: job.max_steps or None]
        training = Training(inputs, iter(batches))
        saved_at = int(len(batches) * job.saved_at)
        training.timed_steps(saved_at)
        measured: dict[str, Any] = {"steps": len(batches), "saved_at": saved_at, "auc": {}, "max_error": {}}
        saves = {codec: _save(training, scratch / codec, codec) for codec in (EXACT, *LOSSY)}
        for codec, checkpointer in saves.items():
            loaded = checkpointer.load()
            assert loaded is not None
            measured["max_error"][codec] = max(entry.max_error for entry in loaded.state.newest.rows)
            training.steps_done, training.batches = saved_at, iter(batches[saved_at:])
            training.timed_steps(len(batches) - saved_at)
            values = evaluate(training.model, inputs.test_loader, inputs.device)
            measured["auc"][codec] = values.auc
            checkpointer.close()
    finally:
        inputs.close()
    return measured


def _save(training: Training, folder: Path, codec: str) -> Checkpointer:
    """A base, and on top of it a row save of all rows."""
    checkpointer = Checkpointer(
        training.model,
        CheckpointConfig(uri=str(folder), codec=codec, merge_after=0),
        training.optimizers.table_optimizers,
    )
    checkpointer.register("optimizers", training.optimizers)
    checkpointer.save("consistent")
    checkpointer.save_rows(
        {
            shard.name: torch.arange(shard.row_offset, shard.row_offset + shard.num_rows)
            for shard in checkpointer.shards
        }
    )
    checkpointer.wait()
    return checkpointer


if __name__ == "__main__":
    raise SystemExit(main())
