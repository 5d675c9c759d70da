"""What saving costs while a model trains: `python -m experiments.checkpointing [--quick]`.

Two workers train 26 tables of 64 columns, 2.6 GB with the state of row-wise Adagrad, and save them repeatedly
during training: by `torch.distributed.checkpoint` (DCP), both `save` of TorchRec's sharded state and
`async_save` of the plain local tensors, by `torch.save` per rank and fsync, by plain writing (through the
page cache) and fsync, and by `cpr.checkpoint`. All take turns in one run over several rounds, with warm
memory. For the memory figures, an earlier pass starts each of them after free memory was returned to the
system. An interrupted command continues where it stopped. Figures, CPR over the other, each a median over
rounds of the ratio within a round, with `..._low` and `..._high`, the extremes:

- `blocked_ratio_rolling`, `blocked_ratio_consistent`: time that training waits in all, over DCP's `save`. The
  time that a step waits before its update for the copy of its rows counts.
  `blocked_ratio_rolling_to_dcp_async`, `blocked_ratio_consistent_to_dcp_async`: the same over `async_save`.
- `lost_ratio_to_dcp_async`, `lost_ratio_to_dcp_async_consistent`: training time lost, over `async_save`. Lost
  is the time from the start of a save to its commit, minus that of the steps done meanwhile at the
  undisturbed pace, which is the median of 25 steps just before. `lost_ratio_to_dcp_async_with_clearing` also
  counts CPR's work after the commit: verifying the new save and deleting an old one, which DCP leaves to its
  user.
- `save_ratio_to_dcp`, `save_ratio_to_raw`: bytes/s from start to commit of a full save without training
  meanwhile, over DCP's `save` and over plain writing.
- `load_ratio_to_dcp`, `load_ratio_to_dcp_warm`: speed of loading everything (CPR verifies every digest), from
  files that are not in the page cache, and from files that may be.
- `row_save_blocked_share`, `row_save_bytes_share`: a save of 1/8 of the rows, drawn at random, over a full
  rolling save.
- `throughput_while_saving`: steps/s from start to commit of a rolling save over those before it.
- `peak_extra_bytes`, `peak_extra_bytes_consistent`, `peak_extra_bytes_dcp_async`: largest growth of a
  worker's memory (RSS) from the construction of the checkpointer to the commit; of the worker with the
  largest growth.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from experiments.checkpointing.job import Job
from experiments.checkpointing.picture import draw
from experiments.harness.command import experiment_parser
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.statistics import median_figures
from experiments.harness.workers import OneMachine, Workers

ROUNDS: Final = 4
PROCESSES: Final = 2
KEEP_MEMORY: Final = {
    "GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.arena_max=1"
}
"""Keeps all freed memory in the process, so that the second save of each saver finds its memory warm.
Stronger than `dlrm.launch.malloc`, because DCP copies into blocks beyond the limits of that."""
SCRATCH: Final = Path("runs") / "checkpointing"
"""Folder of the checkpoints, up to 20 GB; deleted at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    job, rounds = Job(), options.rounds
    if options.quick:
        job, rounds = Job(rows=4000, global_batch_size=64, steps_before=2), 1
    record = Record("checkpointing", asdict(job) | {"rounds": rounds}, seeds=[job.seed], quick=options.quick)
    scratch = QUICK / "checkpointing" if options.quick else SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    scratch.mkdir(parents=True)
    request = {"job": asdict(job), "scratch": str(scratch.absolute())}
    worker = "experiments.checkpointing.worker"
    try:
        with Workers(OneMachine(PROCESSES), worker, request, threads=1, environment=KEEP_MEMORY) as workers:
            record.measure("memory", workers.ask)
            for number in range(rounds):
                record.measure(f"round {number}", partial(workers.ask, round=number))
                print(f"round {number}: stored", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return record.publish(figures_of(record.rows), draw, NOTES)


def ratios(rows: Sequence[Row], ours: Callable[[Row], float], theirs: Callable[[Row], float]) -> list[float]:
    """CPR's value over the other's within each round."""
    return [ours(row) / theirs(row) for row in rows if "round" in row]


def figures_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """All figures."""

    def saver(name: str, value: str) -> Callable[[Row], float]:
        return lambda row: float(row["savers"][name][value])

    def rate(name: str) -> Callable[[Row], float]:
        return lambda row: row["savers"][name]["bytes"] / row["savers"][name]["committed_s"]

    def load_rate(name: str) -> Callable[[Row], float]:
        return lambda row: 1 / float(row["loads"][name])

    def pace(row: Row) -> float:
        saved = row["savers"]["ours rolling"]
        return float(saved["steps"] / saved["wall_s"])

    def lost_for_good(name: str) -> Callable[[Row], float]:
        return lambda row: float(row["savers"][name]["lost_s"] + row["savers"][name]["lost_after_s"])

    pairs = {
        "blocked_ratio_rolling": (saver("ours rolling", "blocked_s"), saver("dcp save", "blocked_s")),
        "blocked_ratio_consistent": (saver("ours consistent", "blocked_s"), saver("dcp save", "blocked_s")),
        "blocked_ratio_rolling_to_dcp_async": (
            saver("ours rolling", "blocked_s"),
            saver("dcp async", "blocked_s"),
        ),
        "blocked_ratio_consistent_to_dcp_async": (
            saver("ours consistent", "blocked_s"),
            saver("dcp async", "blocked_s"),
        ),
        "lost_ratio_to_dcp_async": (saver("ours rolling", "lost_s"), saver("dcp async", "lost_s")),
        "lost_ratio_to_dcp_async_consistent": (
            saver("ours consistent", "lost_s"),
            saver("dcp async", "lost_s"),
        ),
        "lost_ratio_to_dcp_async_with_clearing": (lost_for_good("ours rolling"), lost_for_good("dcp async")),
        "save_ratio_to_dcp": (rate("ours waiting"), rate("dcp save")),
        "save_ratio_to_raw": (rate("ours waiting"), rate("raw")),
        "load_ratio_to_dcp": (load_rate("ours cold"), load_rate("dcp cold")),
        "load_ratio_to_dcp_warm": (load_rate("ours warm"), load_rate("dcp warm")),
        "row_save_blocked_share": (saver("ours rows", "blocked_s"), saver("ours rolling", "blocked_s")),
        "row_save_bytes_share": (saver("ours rows", "bytes"), saver("ours rolling", "bytes")),
        "throughput_while_saving": (
            pace,
            lambda row: 1 / float(row["savers"]["ours rolling"]["undisturbed_step_s"]),
        ),
    }
    figures: dict[str, float | None] = {}
    for name, (ours, theirs) in pairs.items():
        figures |= median_figures(name, ratios(rows, ours, theirs))
    (alone,) = (row for row in rows if row["key"] == "memory")
    for name, which in (
        ("", "ours rolling"),
        ("_consistent", "ours consistent"),
        ("_dcp_async", "dcp async"),
    ):
        figures[f"peak_extra_bytes{name}"] = alone["savers"][which]["extra_bytes"]
    return figures


NOTES: Final = {
    "blocked_ratio_consistent": (
        "The consistent save has memory for all rows of a worker, so that training waits for the copy alone; "
        "peak_extra_bytes_consistent is that memory. The rolling save has a limit of 512 MiB."
    ),
    "lost_ratio_to_dcp_async": (
        "async_save gets plain local tensors: TorchRec's ShardedTensor fails in it on the CPU with "
        "torch 2.13."
    ),
    "load_ratio_to_dcp_warm": (
        "cpr.checkpoint bypasses the page cache when writing, where the file system allows it, so that only "
        "reading brings its files into the cache. DCP's files may be in the cache from writing."
    ),
}
