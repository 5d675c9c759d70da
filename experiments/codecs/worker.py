"""Worker of one seed of `experiments.codecs`.

The batches stay in memory, so that training continues with the same ones after the load with each codec.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.training.data import prepare
from dlrm.training.evaluation import evaluate
from experiments.codecs.run import EXACT, LOSSY, CodecJob
from experiments.harness.training import Training
from experiments.harness.worker_process import job_from, worker_process_group, write_measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure accuracy and error of all codecs for one seed, and write the result for the launcher."""
    job = job_from(arguments)
    with worker_process_group() as ranks:
        measured = _measure(CodecJob(**job["job"]), Path(job["scratch"]), ranks)
    write_measured(job, ranks, measured)
    return 0


def _measure(job: CodecJob, scratch: Path, ranks: Ranks) -> dict[str, Any]:
    """Train, save, load and train to the end with each codec; returns AUC and largest error by codec."""
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
    """Write a full save, and a row save of all rows with `codec` on top of it."""
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
