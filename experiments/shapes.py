"""How fast a training step is in all shapes: `python -m experiments.shapes [--quick]`.

As `experiments.throughput`, but for DLRM with small and large batches, narrow and wide tables, one id and
four ids a table; for DCN-v2; and for DeepFM, which TorchRec lacks: there it trains the network of this
project. First each side's fastest setting of a shape is chosen by one measurement of each, which counts for
nothing else: one process of two threads or two processes of one thread, TorchRec with and without its
pipeline; in fp32, and in mixed precision where the processor has products in bfloat16. Then these two, and
TorchRec's with this trainer's memory settings, take turns over several rounds. An interrupted command
continues where it stopped. Figures, each a median over rounds of the ratio within a round, with `..._low` and
`..._high`, the extremes:

- `ratio_<shape>`, for example `ratio_kaggle_128`: samples/s over those of TorchRec as it comes.
- `ratio_<shape>_keeping_memory`: over those of TorchRec with this trainer's memory settings.
- `worst_ratio_to_torchrec`, `worst_ratio_keeping_memory`: the lowest of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import torch
from matplotlib.figure import Figure

from dlrm.models.mlp import ONEDNN_DTYPES
from experiments.harness.command import experiment_parser
from experiments.harness.plotting import median_bars
from experiments.harness.record import Record, Row
from experiments.harness.statistics import median_figures
from experiments.harness.workload import OURS, TORCHREC, Setting, Workload
from experiments.throughput.run import best, launch, rates_by_round, ratios, turns

ROUNDS: Final = 3
_large: Final = partial(Workload, warm_up_steps=6, steps=16)
"""A workload of large batches, whose steps take up to a second."""
SHAPES: Final[Mapping[str, Workload]] = {
    **{f"kaggle_{each}": Workload(recipe="kaggle", global_batch_size=each) for each in (128, 1024)},
    **{f"kaggle_{each}": _large(recipe="kaggle", global_batch_size=each) for each in (4096, 16_384)},
    **{f"terabyte_{each}": Workload(global_batch_size=each) for each in (256, 2048)},
    "terabyte_8192": _large(global_batch_size=8192),
    "terabyte_2048_multi_hot": Workload(ids_per_sample=4 * Workload().num_tables),
    "dcnv2_2048": Workload(recipe="dcnv2"),
    "deepfm_2048": Workload(recipe="deepfm"),
}
"""By recipe and samples in a step."""
ENDINGS: Final = {"": "worst_ratio_to_torchrec", "_keeping_memory": "worst_ratio_keeping_memory"}
"""Ends of the names of figures, with the name of the lowest of them."""
KEEPS: Final = "keeps memory"
"""End of a label: with this trainer's memory settings."""
PRECISIONS: Final = ("fp32", "bf16") if torch.bfloat16 in ONEDNN_DTYPES else ("fp32",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    shapes, rounds = SHAPES, options.rounds
    sides = [[each for each in side if each.precision in PRECISIONS] for side in (OURS, TORCHREC)]
    if options.quick:
        shrink = partial(replace, rows=2000, global_batch_size=64, warm_up_steps=2, steps=3)
        shapes, rounds = {name: shrink(SHAPES[name]) for name in ("kaggle_128", "deepfm_2048")}, 1
        sides = [side[:2] for side in sides]
    config = {"shapes": {name: asdict(each) for name, each in shapes.items()}, "rounds": rounds}
    record = Record("shapes", config, seeds=[Workload().seed], quick=options.quick)
    for name, workload in shapes.items():
        for setting in turns(*sides):
            _measure(record, name, None, setting, workload)
    for number in range(rounds):
        for name, workload in shapes.items():
            for setting in _chosen(record.rows, name, sides)[:: -1 if number % 2 else 1]:
                _measure(record, name, number, setting, workload)
    return record.publish(figures_of(record.rows), draw)


def _measure(record: Record, shape: str, number: int | None, setting: Setting, workload: Workload) -> None:
    """Measure a setting in a round, or (None) for the choice of settings."""
    key = f"{shape}, {'choice' if number is None else f'round {number}'}: {setting.name}"
    circumstances = {"shape": shape, "round": number, "setting": setting.name}
    row = record.measure(key, lambda: {**circumstances, **launch(setting, workload)})
    print(f"{key} {row['samples_per_s']:,.0f} samples/s", flush=True)


def _chosen(rows: Sequence[Row], shape: str, sides: Sequence[Sequence[Setting]]) -> list[Setting]:
    """TorchRec's and our fastest setting in the choice for a shape, and TorchRec's keeping memory."""
    measured = [row for row in rows if (row["shape"], row["round"]) == (shape, None)]
    rates = {row["setting"]: row["samples_per_s"] for row in measured}
    ours, rival = (best([rates], side) for side in sides)
    return [rival, ours, replace(rival, keeps_memory=True)]


def ratios_by_shape(rows: Sequence[Row], *, keeping_memory: bool) -> dict[str, list[float]]:
    """Our rate over TorchRec's in each round, by shape."""
    rounds = 1 + max(row["round"] for row in rows if row["round"] is not None)
    found = {}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        rates = rates_by_round([row for row in rows if row["shape"] == shape], rounds)
        found[shape] = ratios(rates, {}, {"keeps_memory": keeping_memory})
    return found


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for ending, worst in ENDINGS.items():
        found = ratios_by_shape(rows, keeping_memory=bool(ending))
        for shape, values in found.items():
            figures |= median_figures(f"ratio_{shape}{ending}", values)
        figures |= median_figures(worst, min(found.values(), key=median))
    return figures


def draw(result: Row, folder: Path) -> None:
    """Draw both ratios of every shape."""
    as_it_comes, keeping = (ratios_by_shape(result["rows"], keeping_memory=each) for each in (False, True))
    bars = {}
    for shape in as_it_comes:
        bars[shape.replace("_", " ")] = as_it_comes[shape]
        bars[f"{shape.replace('_', ' ')}, {KEEPS}"] = keeping[shape]
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    hatched = [label for label in bars if label.endswith(KEEPS)]
    median_bars(axes, bars, highlighted=bars, hatched=hatched, digits=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("samples/s over TorchRec's, the fastest setting of each (bar: median; dots: rounds)")
    axes.set_title("Training speed by recipe and global batch size", fontsize=10)
    figure.savefig(folder / "shapes.png", dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
