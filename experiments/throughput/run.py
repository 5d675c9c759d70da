"""How fast a training step is: `python -m experiments.throughput [--quick]`.

This trainer and TorchRec's own DLRM take turns over several rounds on the same tables, batches, optimizers
and cores, each in all its settings (`experiments.harness.workload`): fp32 and mixed precision, one process
with two threads and two processes with one, TorchRec with and without its pipeline. Every measurement is a
torchrun launch of its own, which warms up and then reports its median step. PyTorch's profiler measures one
more run of the best setting of each side. An interrupted command continues where it stopped. Figures, each a
median over rounds of the ratio within a round:

- `ratio_to_torchrec_best`: our best mixed-precision setting over the best of all of TorchRec's, with
  `..._low` and `..._high`, the extremes.
- `ratio_to_torchrec_fp32`: our best fp32 setting over TorchRec's best fp32 setting, extremes likewise.
- `ratio_1_process`, `ratio_2_processes`: as the first, among the settings with that many processes.
- `ratio_to_torchrec_keeping_memory`: as the first, over TorchRec's best setting with this trainer's memory
  settings (freed memory stays in the process, huge pages).
- `samples_per_s`: of this trainer, the best setting of each round.
- `matmul_share`: of a step of that setting, by the profile: matrix products of layers and of the interaction
  (with its indexing), which no trainer can save.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlrm.launch.malloc import HUGE_PAGES
from experiments.harness.command import experiment_parser
from experiments.harness.launch import measure_under_torchrun
from experiments.harness.plotting import median_bars
from experiments.harness.record import Record, Row
from experiments.harness.statistics import median_figures
from experiments.harness.workload import OURS, TORCHREC, Setting, Workload
from experiments.throughput.breakdown import PRODUCTS

ROUNDS: Final = 5
SETTINGS: Final = {
    setting.name: setting
    for setting in (*OURS, *TORCHREC, *(replace(each, keeps_memory=True) for each in TORCHREC))
}

Fields = Mapping[str, Any]
"""Values of fields of `Setting`, which select the settings that take part in a comparison."""
COMPARED: Final[Mapping[str, tuple[Fields, Fields]]] = {
    "ratio_to_torchrec_best": ({"precision": "bf16"}, {"keeps_memory": False}),
    "ratio_to_torchrec_fp32": ({"precision": "fp32"}, {"precision": "fp32", "keeps_memory": False}),
    "ratio_1_process": ({"precision": "bf16", "processes": 1}, {"processes": 1, "keeps_memory": False}),
    "ratio_2_processes": ({"precision": "bf16", "processes": 2}, {"processes": 2, "keeps_memory": False}),
    "ratio_to_torchrec_keeping_memory": ({"precision": "bf16"}, {"keeps_memory": True}),
}
"""Our settings, and TorchRec's that they are compared with, by figure."""

Rates = dict[str, float]
"""Samples/s in one round, by name of the setting."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    workload, settings, rounds = Workload(), turns(OURS, TORCHREC), options.rounds
    if options.quick:
        workload = Workload(rows=2000, global_batch_size=256, warm_up_steps=3, steps=5)
        settings, rounds = [OURS[0], TORCHREC[1]], 1
    record = Record(
        "throughput", asdict(workload) | {"rounds": rounds}, seeds=[workload.seed], quick=options.quick
    )
    for number in range(rounds):
        _play_round(record, number, workload, settings)
    rates = rates_by_round(record.rows, rounds)
    for setting in (best(rates, OURS), best(rates, TORCHREC)):
        record.measure(f"profile {setting.name}", partial(launch, setting, workload, profiled=True))
    figures = figures_of(record.rows, rounds)
    return record.publish(figures, draw, _notes(figures))


def turns(ours: Sequence[Setting], rivals: Sequence[Setting]) -> list[Setting]:
    """Interleave both sides as evenly as their numbers allow."""
    placed = [((place + 0.5) / len(side), each) for side in (ours, rivals) for place, each in enumerate(side)]
    return [each for _, each in sorted(placed, key=lambda pair: pair[0])]


def _play_round(record: Record, number: int, workload: Workload, settings: Sequence[Setting]) -> None:
    """Measure every setting once, in reverse every other round; then TorchRec's best, keeping memory."""
    for setting in settings if number % 2 == 0 else reversed(settings):
        _measure(record, number, setting, workload)
    winner = best(rates_by_round(record.rows, number + 1)[number:], TORCHREC)
    _measure(record, number, replace(winner, keeps_memory=True), workload)


def _measure(record: Record, number: int, setting: Setting, workload: Workload) -> None:
    key = f"round {number}: {setting.name}"
    row = record.measure(key, lambda: {"round": number, "setting": setting.name, **launch(setting, workload)})
    print(f"{key} {row['samples_per_s']:,.0f} samples/s", flush=True)


def launch(setting: Setting, workload: Workload, profiled: bool = False) -> Row:
    """Measure a setting by a launch under torchrun."""
    return measure_under_torchrun(
        "experiments.throughput.worker",
        {"setting": asdict(setting), "workload": asdict(workload), "profiled": profiled},
        processes=setting.processes,
        threads=setting.threads,
        environment=HUGE_PAGES if setting.keeps_memory or setting.trainer == "ours" else None,
    )


def rates_by_round(rows: Sequence[Row], rounds: int) -> list[Rates]:
    """Samples/s by setting, for each round."""
    return [
        {row["setting"]: row["samples_per_s"] for row in rows if row.get("round") == number}
        for number in range(rounds)
    ]


def best(rates: Sequence[Rates], among: Iterable[Setting]) -> Setting:
    """Return the measured setting with the highest median over rounds."""
    measured = [setting for setting in among if setting.name in rates[0]]
    return max(measured, key=lambda setting: median(rate[setting.name] for rate in rates))


def ratios(rates: Sequence[Rates], ours: Fields, theirs: Fields) -> list[float]:
    """Ratio, for each round, of our fastest setting with these fields to TorchRec's.

    Rounds in which a side has no such setting are left out.
    """
    found = []
    for rate in rates:
        sides = [
            [rate[name] for name in rate if fields.items() <= asdict(SETTINGS[name]).items()]
            for fields in ({"trainer": "ours", **ours}, {"trainer": "torchrec", **theirs})
        ]
        if all(sides):
            found.append(max(sides[0]) / max(sides[1]))
    return found


def figures_of(rows: Sequence[Row], rounds: int) -> dict[str, float | None]:
    """All figures; None if the settings of a figure were not measured."""
    rates = rates_by_round(rows, rounds)
    found = {name: ratios(rates, *sides) for name, sides in COMPARED.items()}
    figures: dict[str, float | None] = {}
    for name, values in found.items():
        if name.startswith("ratio_to_torchrec") and values:
            figures |= median_figures(name, values)
        else:
            figures[name] = median(values) if values else None
    fastest = [max(value for name, value in rate.items() if name.startswith("ours")) for rate in rates]
    (profile,) = (row["breakdown_ms"] for row in rows if row["key"].startswith("profile ours"))
    products_ms = sum(profile[kind] for kind in PRODUCTS)
    return figures | {
        "samples_per_s": median(fastest),
        "matmul_share": products_ms / sum(profile.values()),
    }


def _notes(figures: dict[str, Any]) -> dict[str, str]:
    notes = {name: "its settings were not measured" for name, value in figures.items() if value is None}
    notes["ratio_to_torchrec_keeping_memory"] = (
        "TorchRec by default returns freed memory to the system at every step; this trainer tells the C "
        "library to keep it, and PyTorch to ask for huge pages (dlrm.launch.malloc). Here TorchRec's best "
        "setting of each round got both."
    )
    return notes


TRAINERS = {"ours": "this trainer,", "torchrec": "TorchRec,"}


def draw(result: Row, folder: Path) -> None:
    """Draw samples/s of every setting above the parts of a step of each side's best setting."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1.2])
    _draw_rates(upper, result["rows"])
    profiles = [row for row in result["rows"] if "breakdown_ms" in row]
    _draw_profiles(lower, {row["key"].removeprefix("profile "): row["breakdown_ms"] for row in profiles})
    figure.savefig(folder / "throughput.png", dpi=150)


def label_of(setting: str) -> str:
    """Name of a setting for readers who have not seen the experiment."""
    trainer, precision, layout, *extras = setting.split(" ", maxsplit=3)
    texts = [f"({extra.replace('pipelined keeps', 'pipelined, keeps')})" for extra in extras]
    return " ".join([TRAINERS[trainer], precision, layout, *texts])


def _draw_rates(axes: Axes, rows: Sequence[Row]) -> None:
    measured: dict[str, list[float]] = {}
    for row in rows:
        if "setting" in row:
            measured.setdefault(label_of(row["setting"]), []).append(row["samples_per_s"] / 1e3)
    names = sorted(measured, key=lambda name: median(measured[name]), reverse=True)
    median_bars(
        axes,
        {name: measured[name] for name in names},
        highlighted=[name for name in names if name.startswith(TRAINERS["ours"])],
        hatched=[name for name in names if "keeps memory" in name],
    )
    axes.set_xlabel("thousand samples/s (bar: median; dots: rounds)")
    axes.set_title(
        "Training speed by precision and processes x threads\n"
        "(keeps memory: TorchRec with this trainer's memory settings; pipelined: TrainPipelineSparseDist)",
        fontsize=10,
    )


def _draw_profiles(axes: Axes, profiles: dict[str, dict[str, float]]) -> None:
    names = list(profiles)[::-1]
    left = [0.0] * len(names)
    for kind in profiles[names[0]]:
        values = [profiles[name][kind] for name in names]
        axes.barh([label_of(name) for name in names], values, left=left, label=kind)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(f"{total:.0f} ms", (total, place), (5, 0), textcoords="offset points", va="center")
    axes.set_xlabel("ms per step in the first process, under PyTorch's profiler")
    axes.set_title("Parts of a step in the best setting of each side", fontsize=10)
    axes.set_xlim(right=1.1 * max(left))
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.32), ncols=4, fontsize=8, frameon=False)
