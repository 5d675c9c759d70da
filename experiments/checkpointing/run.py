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
  undisturbed pace: the median of 25 steps just before and as many just after, as the speed of a virtual
  machine drifts. `lost_ratio_to_dcp_async_with_clearing` also counts CPR's work after the commit: verifying
  the new save and deleting an old one, which DCP leaves to its user.
- `save_ratio_to_dcp`, `save_ratio_to_raw`: bytes/s from start to commit of a full save without training
  meanwhile, over DCP's `save` and over plain writing.
- `load_ratio_to_dcp`, `load_ratio_to_dcp_warm`: speed of loading everything (CPR verifies every digest), from
  files that are not in the page cache, and from files that may be.
- `row_save_blocked_share`, `row_save_bytes_share`: a save of 1/8 of the rows, drawn at random, over a full
  rolling save.
- `throughput_while_saving`: steps/s from start to commit of a rolling save over the undisturbed ones.
- `peak_extra_bytes`, `peak_extra_bytes_consistent`, `peak_extra_bytes_dcp_async`: largest growth of a
  worker's memory (RSS) from the construction of the checkpointer to the commit; of the worker with the
  largest growth.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.checkpointing.job import TrainingJob
from experiments.harness.command import experiment_parser
from experiments.harness.plotting import median_bars
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
RATIOS: Final = {
    "blocked_ratio_rolling": ("blocked_s", "ours rolling", "dcp save"),
    "blocked_ratio_consistent": ("blocked_s", "ours consistent", "dcp save"),
    "blocked_ratio_rolling_to_dcp_async": ("blocked_s", "ours rolling", "dcp async"),
    "blocked_ratio_consistent_to_dcp_async": ("blocked_s", "ours consistent", "dcp async"),
    "lost_ratio_to_dcp_async": ("lost_s", "ours rolling", "dcp async"),
    "lost_ratio_to_dcp_async_consistent": ("lost_s", "ours consistent", "dcp async"),
    "lost_ratio_to_dcp_async_with_clearing": ("lost_s with clearing", "ours rolling", "dcp async"),
    "save_ratio_to_dcp": ("bytes/s", "ours waiting", "dcp save"),
    "save_ratio_to_raw": ("bytes/s", "ours waiting", "raw"),
    "row_save_blocked_share": ("blocked_s", "ours rows", "ours rolling"),
    "row_save_bytes_share": ("bytes", "ours rows", "ours rolling"),
}
"""The quantity that a figure compares, CPR's saver, and the saver by whose value it is divided; by figure."""
NOTES: Final = {
    "blocked_ratio_consistent": (
        "The consistent save has memory for all rows of a worker, so that training waits for the copy alone; "
        "peak_extra_bytes_consistent is that memory. The rolling save has the default limit, 384 MiB."
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
COSTS: Final = {
    "torch.save": "torch.save per rank",
    "dcp save": "PyTorch DCP save",
    "dcp async": "PyTorch DCP async_save",
    "ours consistent": "CPR, consistent\n(copies all rows at once)",
    "ours rolling": "CPR, rolling\n(copies over many steps)",
    "ours rows": "CPR, 1/8 of the rows",
}
RATES: Final = {
    "torch.save": "save: torch.save per rank",
    "dcp save": "save: PyTorch DCP",
    "ours waiting": "save: CPR",
    "raw": "plain write and fsync",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    job, rounds = TrainingJob(precision="fp32"), options.rounds  # not every processor is faster in mixed
    if options.quick:
        job, rounds = replace(job, rows=4000, global_batch_size=64, steps_before=2), 1
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


def figures_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """All figures."""
    rounds = [row for row in rows if "round" in row]
    savers = [row["savers"] for row in rounds]
    rolling = [each["ours rolling"] for each in savers]
    figures: dict[str, float | None] = {}
    for name, (quantity, ours, theirs) in RATIOS.items():
        pairs = [(_quantity(each[ours], quantity), _quantity(each[theirs], quantity)) for each in savers]
        figures |= median_figures(name, [mine / other for mine, other in pairs])
    for ending, state in (("", "cold"), ("_warm", "warm")):
        loads = [row["loads"][f"dcp {state}"] / row["loads"][f"ours {state}"] for row in rounds]
        figures |= median_figures(f"load_ratio_to_dcp{ending}", loads)
    pace = [each["steps"] / each["wall_s"] * each["undisturbed_step_s"] for each in rolling]
    figures |= median_figures("throughput_while_saving", pace)
    (alone,) = (row["savers"] for row in rows if row["key"] == "memory")
    for ending, saver in (
        ("", "ours rolling"),
        ("_consistent", "ours consistent"),
        ("_dcp_async", "dcp async"),
    ):
        figures[f"peak_extra_bytes{ending}"] = alone[saver]["extra_bytes"]
    return figures


def _quantity(saved: Row, name: str) -> float:
    """What was measured of a save, or follows from it."""
    match name:
        case "bytes/s":
            return float(saved["bytes"] / saved["committed_s"])
        case "lost_s with clearing":
            return float(saved["lost_s"] + saved["lost_after_s"])
    return float(saved[name])


def draw(result: Row, folder: Path) -> None:
    """Draw both panels."""
    rounds = [row for row in result["rows"] if "round" in row]
    figure = Figure(figsize=(10, 6.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_costs(upper, rounds)
    _draw_rates(lower, rounds)
    figure.savefig(folder / "checkpointing.png", dpi=150)


def _values(rounds: Sequence[Row], name: str, value: str) -> list[float]:
    return [row["savers"][name][value] for row in rounds]


def _draw_costs(axes: Axes, rounds: Sequence[Row]) -> None:
    """Draw the time to the commit as an outline, and in it the time lost and the time waited."""
    for place, name in enumerate(COSTS):
        colour = "tab:blue" if name.startswith("ours") else "tab:gray"
        waited, lost, whole = (
            median(_values(rounds, name, value)) for value in ("blocked_s", "lost_s", "committed_s")
        )
        axes.barh(place, whole, fill=False, edgecolor=colour, linewidth=0.8)
        axes.barh(place, lost, color=colour, alpha=0.4)
        axes.barh(place, waited, color=colour)
        values = _values(rounds, name, "lost_s")
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        text = f"waits {waited:.2f} s, loses {lost:.2f} s"
        at = (max(whole, *values), place)
        axes.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(COSTS)), list(COSTS.values()))
    axes.invert_yaxis()
    axes.set_xlabel(
        "seconds (full: training waits; pale: training time lost, waits and slower steps together;\n"
        "outline: until the save is committed; dots: training time lost in each round)"
    )
    axes.set_title("Cost of one save for training: 2 workers, 2.6 GB, medians over rounds", fontsize=10)
    axes.set_xlim(left=0, right=1.35 * axes.get_xlim()[1])


def _draw_rates(axes: Axes, rounds: Sequence[Row]) -> None:
    measured = {
        label: [row["savers"][name]["bytes"] / row["savers"][name]["committed_s"] / 1e9 for row in rounds]
        for name, label in RATES.items()
    }
    for name, label in (("dcp", "load: PyTorch DCP"), ("ours", "load: CPR")):
        measured[label] = [
            row["savers"]["dcp save"]["bytes"] / row["loads"][f"{name} cold"] / 1e9 for row in rounds
        ]
    median_bars(axes, measured, highlighted=["save: CPR", "load: CPR"], digits=2)
    axes.set_xlabel("GB/s of both workers together, without training meanwhile (bar: median; dots: rounds)")
    axes.set_title("Speed of full saves, and of loads from files outside the page cache", fontsize=10)
