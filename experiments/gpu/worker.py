"""Worker of `experiments.gpu`: trains on batches in memory, on the device of its job, and measures.

The job says who trains: this trainer with `train.pipeline` `none` or `prefetch`, or `torchrec`, which is
TorchRec's DLRM under TrainPipelineSparseDist. All train on the same batches in page-locked memory.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from data.batch import Batch
from data.loader.copy_ahead import CopyAhead
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks, resolve_device
from dlrm.launch.stop_signal import StopSignal
from dlrm.training.build import build
from dlrm.training.data import Inputs
from experiments.harness.record import Row
from experiments.harness.worker_process import job_from, worker_process_group, write_measured
from experiments.harness.workload import TimedBatches, Workload, inputs_of
from experiments.throughput.torchrec_training import TorchRecTraining

TORCHREC: Final = "torchrec"


class Clock:
    """Times the steps after the first ones.

    Both moments are after all work that the device was given before. A trainer that reads ahead does so by as
    much at each of them, so that as many steps lie between them as batches.
    """

    def __init__(self, device: torch.device, workload: Workload) -> None:
        self._device = device
        self._marked = (workload.warm_up_steps, workload.warm_up_steps + workload.steps)
        self._samples = workload.steps * workload.global_batch_size
        self._asked = 0
        self._moments: list[float] = []

    def tick(self) -> None:
        """Note that the trainer asks for one more batch."""
        self._asked += 1
        if self._asked in self._marked:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._moments.append(perf_counter())

    @property
    def samples_per_s(self) -> float:
        """Of the timed steps, at the end."""
        started, ended = self._moments
        return self._samples / (ended - started)


class _Batches(TimedBatches):
    """Timed batches for a device; those for a GPU are in page-locked memory.

    With `copies_ahead` they are copied there one batch ahead, as the trainer's loader does it.
    """

    def __init__(
        self, workload: Workload, ranks: Ranks, clock: Clock, device: torch.device, copies_ahead: bool
    ) -> None:
        steps = workload.warm_up_steps + workload.steps + 1  # nothing is asked for after the last one
        super().__init__(
            workload, steps=steps, rank=ranks.rank, world_size=ranks.world_size, after_step=clock.tick
        )
        on_gpu = device.type == "cuda"
        self._copies = CopyAhead(device) if on_gpu and copies_ahead else None
        if on_gpu:
            self._batches = [batch.pin_memory() for batch in self._batches]

    def _epoch(self) -> Iterator[Batch]:
        batches = super()._epoch()
        return batches if self._copies is None else self._copies.over(batches)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the job says, and write samples/s and, of this trainer, the logged losses."""
    job = job_from(arguments)
    device = resolve_device(job["device"], Ranks.from_environment())
    with worker_process_group(device=device) as ranks:
        measured = _measure(job, device, ranks)
    write_measured(job, ranks, measured)
    return 0


def _measure(job: Row, device: torch.device, ranks: Ranks) -> Row:
    workload, is_ours = Workload(**job["workload"]), job["trainer"] != TORCHREC
    clock = Clock(device, workload)
    batches = _Batches(workload, ranks, clock, device, copies_ahead=is_ours)
    with tempfile.TemporaryDirectory() as scratch:
        overrides = {
            "train.device": device.type,
            "train.precision": job["precision"],
            "train.pipeline": job["trainer"] if is_ours else "none",
            "train.max_steps": len(batches),
            "train.log_every_steps": 1 if job["losses"] else 1000,
            "train.run_folder": scratch,
            "data.global_batch_size": workload.global_batch_size,
            "sharding.strategy": "torchrec",
        }
        config = load_config(workload.recipe, [f"{name}={value}" for name, value in overrides.items()])
        if not is_ours:
            rival = TorchRecTraining(config, workload.features, batches.config.batch_size, device)
            rival.train_pipelined(batches)
            return {"samples_per_s": clock.samples_per_s}
        last = TimedBatches(workload, steps=1, rank=ranks.rank, world_size=ranks.world_size)
        inputs = inputs_of(config, workload.recipe, ranks, workload.features, batches, last, device)
        _train(inputs)
        (folder,) = Path(scratch).iterdir()
        return {"samples_per_s": clock.samples_per_s, "losses": logged_losses(folder)}


def _train(inputs: Inputs) -> None:
    """Train with the whole loop of `dlrm.train`, metrics and an evaluation included."""
    with StopSignal() as stop:
        trainer = build(inputs, stop)
        try:
            trainer.train()
        finally:
            trainer.session.close()
            trainer.telemetry.close()


def logged_losses(run_folder: Path) -> list[float]:
    """The mean training losses that a run has logged, in order."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    raise SystemExit(main())
