"""Every model against its counterpart: `python -m experiments.models [--data DIR] [--only MODEL]`.

DLRM and DCN-v2 are compared with TorchRec's classes, DeepFM, the factorization machine and logistic
regression with DeepCTR-Torch's (`references`): the same batches in the same order for one epoch, embedding
dim and layers of our recipes, one process with one thread. Each side trains with every optimizer setting
below, is evaluated on the second last day of the data, and keeps the setting with the highest AUC there. With
it, both sides train once per seed and are evaluated on the last day, which decided nothing. References may
also choose Adam for all parameters, which our tables do not have. A run is a row of the result; an
interrupted command continues with the next. Figures, for each `MODEL` (dlrm, dcnv2, deepfm, fm, lr):

- `auc_minus_reference_MODEL`, `log_loss_minus_reference_MODEL`: difference on the last day between the two
  sides of a seed, mean over seeds; with `..._ci`, half the width of its 95 % interval (Student's t).
- `auc_MODEL`, `auc_reference_MODEL`, `log_loss_MODEL`, `log_loss_reference_MODEL`: means over seeds.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

import torch
from matplotlib.figure import Figure

from data.dataset import DatasetManifest, read_manifest
from data.synthetic import SyntheticConfig
from experiments.harness.command import experiment_parser
from experiments.harness.launch import ROOT
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.samples import generated, identity_of
from experiments.harness.statistics import Estimate
from experiments.harness.worker_process import worker_process_group
from experiments.models.contenders import OURS, RECIPES, REFERENCE, Setting, Task, train
from experiments.models.references import LIBRARIES, check_features

SETTINGS: Final = (
    Setting(tables="adagrad", tables_rate=0.05, dense="adam", dense_rate=0.001, warmup_steps=100),
    Setting(tables="adagrad", tables_rate=0.05, dense="adam", dense_rate=0.003, warmup_steps=100),
    Setting(tables="adagrad", tables_rate=0.02, dense="adam", dense_rate=0.001),
    Setting(tables="adagrad", tables_rate=0.02, dense="adagrad", dense_rate=0.02),
)
"""What both sides choose from."""
REFERENCE_SETTINGS: Final = (
    Setting(tables="adam", tables_rate=0.001, dense="adam", dense_rate=0.001),
    Setting(tables="adam", tables_rate=0.003, dense="adam", dense_rate=0.003),
)
"""What references choose from as well: Adam, at the rate of DeepCTR-Torch's `compile("adam")` and at three
times that."""
SEEDS: Final = 5
CHOICE_SEED: Final = 1000
"""Seed of the runs that choose the settings."""
MARGIN: Final = 0.002
"""Largest difference in AUC, and in log loss, that counts as equal; fixed before the first measurement."""
DATA: Final = SyntheticConfig(days=5, rows_per_day=150_000)
"""Three days to train on."""
QUICK_DATA: Final = SyntheticConfig(scale=1e-4, days=3, rows_per_day=2048)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--data", type=Path, help="prepared data of 3 days or more; default: generated data")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default {SEEDS}")
    only = "measure this model alone, and keep the stored rows of the others"
    parser.add_argument("--only", choices=RECIPES, help=only)
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}; an interval takes at least 2")
    folder = options.data or _default_dataset(quick=options.quick)
    try:
        manifest = read_manifest(str(folder))
        check_features(manifest.features)
        choice, test = _tasks(str(folder), manifest)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    seeds = range(2 if options.quick else options.seeds)
    ours, others = (SETTINGS[:2], REFERENCE_SETTINGS[:1]) if options.quick else (SETTINGS, REFERENCE_SETTINGS)
    config = {
        "dataset": identity_of(str(folder)),
        "train_days": choice.train_days,
        "choice_day": choice.evaluated_day,
        "test_day": test.evaluated_day,
        "settings": [str(setting) for setting in ours],
        "reference_settings": [str(setting) for setting in others],
    }
    # the report's result is of the generated data
    elsewhere = options.quick or options.data is not None
    record = Record("models", config, seeds=list(seeds), quick=elsewhere)
    if options.only:
        try:
            record.keep(lambda row: row["model"] != options.only)
        except ValueError as error:
            parser.error(str(error))
    torch.set_num_threads(1)
    with worker_process_group():
        for kind in [options.only] if options.only else RECIPES:
            for side, settings in ((OURS, ours), (REFERENCE, (*ours, *others))):
                chosen = _choose(record, choice, kind, side, settings)
                for seed in seeds:
                    _measure(record, test, kind, side, chosen, seed)
    return record.publish(figures_of(record.rows), draw)


def _default_dataset(quick: bool) -> Path:
    return (
        generated(QUICK_DATA, QUICK / "models-data")
        if quick
        else generated(DATA, ROOT / "datasets" / "models")
    )


def _tasks(dataset: str, manifest: DatasetManifest) -> tuple[Task, Task]:
    """Where settings are chosen, and what is reported; they differ in the day of the evaluation."""
    if len(manifest.days) < 3:
        raise ValueError(
            f"{dataset} has {len(manifest.days)} days; the last two are for choosing settings and for the "
            "test, the others for training: prepare 3 or more"
        )
    *train_days, choice, test = manifest.days
    first, second = (
        Task(dataset=dataset, train_days=tuple(train_days), evaluated_day=day) for day in (choice, test)
    )
    return first, second


def _choose(record: Record, task: Task, kind: str, side: str, settings: Sequence[Setting]) -> Setting:
    aucs = {setting: _measure(record, task, kind, side, setting, CHOICE_SEED)["auc"] for setting in settings}
    return max(aucs, key=lambda setting: aucs[setting])


def _measure(record: Record, task: Task, kind: str, side: str, setting: Setting, seed: int) -> Row:
    key = f"{kind} {side} ({setting}) day {task.evaluated_day} seed {seed}"
    row = record.measure(key, lambda: train(task, kind, side, setting, seed))
    print(f"{key}: AUC {row['auc']:.5f}, log loss {row['log_loss']:.5f}", flush=True)
    return row


def _reported(rows: Iterable[Row], kind: str, side: str, metric: str) -> list[float]:
    """Values of a metric on the test day, by seed."""
    return [
        row[metric]
        for row in rows
        if (row["model"], row["side"]) == (kind, side) and row["seed"] != CHOICE_SEED
    ]


def differences(rows: Iterable[Row], kind: str, metric: str) -> list[float]:
    """Ours minus the reference's, for each seed."""
    rows = list(rows)
    ours, references = (_reported(rows, kind, side, metric) for side in (OURS, REFERENCE))
    return [own - other for own, other in zip(ours, references, strict=True)]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    return dict(_figures(rows))


def _figures(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    for kind in RECIPES:
        for metric in ("auc", "log_loss"):
            difference = Estimate.of(differences(rows, kind, metric))
            yield from difference.figures(f"{metric}_minus_reference_{kind}").items()
            yield f"{metric}_{kind}", mean(_reported(rows, kind, OURS, metric))
            yield f"{metric}_reference_{kind}", mean(_reported(rows, kind, REFERENCE, metric))


def draw(result: Row, folder: Path) -> None:
    """Draw the differences of all seeds, with their means and the margin."""
    rows, figures = result["rows"], result["figures"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (metric, title) in zip(
        figure.subplots(1, 2), (("auc", "AUC"), ("log_loss", "log loss")), strict=True
    ):
        limit = MARGIN * TEN_THOUSANDTHS * (-1 if metric == "auc" else 1)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(limit, color="tab:red", linewidth=0.8, linestyle="--", label="margin")
        for place, kind in enumerate(RECIPES):
            seeds = [value * TEN_THOUSANDTHS for value in differences(rows, kind, metric)]
            name = f"{metric}_minus_reference_{kind}"
            value, ci = (figures[f"{name}{end}"] * TEN_THOUSANDTHS for end in ("", "_ci"))
            axes.plot([place - 0.15] * len(seeds), seeds, ".", color="tab:gray")
            axes.errorbar([place + 0.1], [value], yerr=[ci], fmt="s", color="tab:blue", capsize=4)
        axes.set_xticks(range(len(RECIPES)), [f"{kind}\n{LIBRARIES[kind]}" for kind in RECIPES], fontsize=7)
        axes.set_ylabel(f"{title} minus the reference's, in 1e-4")
        axes.legend(fontsize=7)
    figure.suptitle("Every model against its counterpart in a public library, by seed and mean", fontsize=10)
    figure.savefig(folder / "models.png", dpi=150)
