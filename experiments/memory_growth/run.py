"""Whether training's host memory grows: `python -m experiments.memory_growth [DATASET] [--quick]`.

The `tiny` recipe is trained under torchrun for 60,000 small steps over many epochs of one day, with an
evaluation every 1,000 steps. Each worker writes down its memory every 20 steps
(`experiments.memory_growth.worker`): what is in use, that is, allocated of the C library and not freed; and
the resident set size (RSS), which also holds what was freed and lies in pieces between the rest. What is in
use tells a leak of a few kilobytes, but for Python's small objects, which Python keeps itself; RSS has all,
and moves by megabytes with the moments at which threads ask for memory. Figures, of the worker that grew
most:

- `growth_bytes_per_1000_steps`: slope of a least squares fit to what is in use over the second half of the
  run, with `..._ci`, half the width of its 95 % confidence interval.
- `rss_growth_bytes_per_1000_steps`, `..._ci`: the same of RSS.
- `rss_end_over_start`: mean RSS over the last tenth of the run / mean RSS over the second tenth.
- `pss_end_over_start`: the same of the proportional set size, which counts shared pages once.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import linregress
from scipy.stats import t as student_t

from experiments.harness.launch import check_ended_well, running, torchrun_command
from experiments.harness.record import Record, Row
from experiments.precision import CONFIDENCE, default_dataset

PROCESSES: Final = 2
KINDS: Final = {"in_use_bytes": "in use", "rss_bytes": "RSS", "pss_bytes": "PSS"}
SHOWN_EVERY_S: Final = 5.0
WARM_UP_SHARE: Final = 0.1
BLOCKS: Final = 10
"""Medians that the fit uses: neighbouring samples are too much alike for a confidence interval, and what an
evaluation or a decoded row group takes for a moment is no growth."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("dataset", nargs="?", type=Path, help="prepared data; default datasets/tiny, made if absent")
    add("--quick", action="store_true", help="a small run, which overwrites no stored result")
    options = parser.parse_args(arguments)
    settings = {
        "data.global_batch_size": 256,
        "data.train_days": [0],
        "train.seed": 0,
        "train.epochs": 1000,
        "train.max_steps": 440 if options.quick else 60_000,
        "train.log_every_steps": 10 if options.quick else 100,
        "train.evaluate_every_steps": 40 if options.quick else 1000,
        "train.device": "cpu",
    }
    record = Record(
        "memory_growth",
        {"recipe": "tiny", "processes": PROCESSES, **settings},
        seeds=[0],
        quick=options.quick,
    )
    folder = options.dataset or default_dataset(quick=options.quick)
    row = record.measure("run", partial(_train_watched, {**settings, "data.uri": str(folder)}))
    figures = figures_of(row["samples"])
    path = record.finish(figures)
    _draw(row["samples"], figures, path.with_suffix(".png"))
    print(f"{figures}\nstored in {path}")
    return 0


def _train_watched(settings: dict[str, Any]) -> Row:
    """Train, and gather what the workers wrote down."""
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        pairs = {**settings, "train.run_folder": str(Path(scratch) / "runs")}.items()
        overrides = [f"{name}={json.dumps(value)}" for name, value in pairs]
        arguments = [scratch, "--recipe", "tiny", "--set", *overrides]
        command = torchrun_command("experiments.memory_growth.worker", arguments, PROCESSES)
        with (
            tempfile.TemporaryFile("w+") as output,
            running(command, threads=1, output=output) as launcher,
        ):
            while launcher.poll() is None:
                time.sleep(SHOWN_EVERY_S)
                for sample in _written(Path(scratch))[-1:]:
                    shown = (f"{name} {max(sample[kind]) / 1e6:.1f} MB" for kind, name in KINDS.items())
                    print(f"step {sample['step']}: {', '.join(shown)}", flush=True)
            check_ended_well(launcher, output)
        return {"samples": _written(Path(scratch))}


def _written(folder: Path) -> list[Row]:
    """What all workers have written down so far: for each step and kind of memory, one of each worker."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    lines = [map(json.loads, text[: text.rfind("\n") + 1].splitlines()) for text in texts]
    return [
        {"step": of_step[0]["step"], **{kind: [each[kind] for each in of_step] for kind in KINDS}}
        for of_step in zip(*lines, strict=False)  # one may be a line ahead
    ]


def growth_per_1000_steps(steps: Sequence[int], num_bytes: Sequence[int]) -> tuple[float, float]:
    """Slope over the second half and half the width of its confidence interval, both in bytes.

    Args:
        steps: ascending.
        num_bytes: memory after each of them.
    """
    half = len(steps) // 2
    places = np.array_split(np.arange(half, len(steps)), BLOCKS)
    x = [float(np.mean(np.asarray(steps)[place])) / 1000 for place in places]
    y = [float(np.median(np.asarray(num_bytes)[place])) for place in places]
    fit = linregress(x, y)
    quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, BLOCKS - 2))
    return float(fit.slope), quantile * float(fit.stderr)


def end_over_start(steps: Sequence[int], num_bytes: Sequence[int]) -> float:
    """Mean over the last tenth of the run / mean over the second tenth."""
    tenth = steps[-1] * WARM_UP_SHARE
    start = [value for step, value in zip(steps, num_bytes, strict=True) if tenth < step <= 2 * tenth]
    end = [value for step, value in zip(steps, num_bytes, strict=True) if step > steps[-1] - tenth]
    return mean(end) / mean(start)


def figures_of(samples: Sequence[Row]) -> dict[str, float]:
    """The figures from what was read of all workers."""
    steps = [sample["step"] for sample in samples]

    def of_workers(kind: str) -> list[list[int]]:
        return [list(worker) for worker in zip(*(sample[kind] for sample in samples), strict=True)]

    in_use, rss = (
        max(growth_per_1000_steps(steps, worker) for worker in of_workers(kind))
        for kind in ("in_use_bytes", "rss_bytes")
    )
    return {
        "growth_bytes_per_1000_steps": in_use[0],
        "growth_bytes_per_1000_steps_ci": in_use[1],
        "rss_growth_bytes_per_1000_steps": rss[0],
        "rss_growth_bytes_per_1000_steps_ci": rss[1],
        "rss_end_over_start": max(end_over_start(steps, worker) for worker in of_workers("rss_bytes")),
        "pss_end_over_start": max(end_over_start(steps, worker) for worker in of_workers("pss_bytes")),
    }


def _draw(samples: Sequence[Row], figures: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    steps = [sample["step"] for sample in samples]
    for (kind, name), style in zip(KINDS.items(), ("-", "--", ":"), strict=True):
        for worker, values in enumerate(zip(*(sample[kind] for sample in samples), strict=True)):
            label = f"worker {worker}, {name}"
            axes.plot(steps, [value / 1e6 for value in values], style, color=f"C{worker}", label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training steps")
    axes.set_ylabel("MB")
    slope, reach = (figures[f"growth_bytes_per_1000_steps{end}"] / 1e3 for end in ("", "_ci"))
    axes.set_title(
        f"Host memory of a training run (in use, second half: {slope:+.0f} ± {reach:.0f} kB per 1,000 steps)",
        fontsize=10,
    )
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)
