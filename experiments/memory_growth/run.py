"""Whether training's host memory grows: `python -m experiments.memory_growth [DATASET] [--quick]`.

The `tiny` recipe is trained under torchrun for 60,000 small steps over many epochs of one day, with an
evaluation every 1,000 steps. Every 20 steps each worker records the bytes in use, that is, allocated from the
C library and not freed, and the resident set size (RSS), which also holds freed fragments. The bytes in use
reveal a leak of a few kilobytes, except of Python's small objects, which Python allocates itself; tensors and
the memory that NumPy and Arrow get from `malloc` are in them. RSS covers
all memory and varies by megabytes with the timing of threads. Figures, of the worker with the largest growth:

- `growth_bytes_per_1000_steps`: slope of a least squares fit to the bytes in use over the second half of the
  run, with `..._ci`, half the width of its 95 % confidence interval.
- `rss_growth_bytes_per_1000_steps`, `..._ci`: the same of RSS.
- `rss_end_over_start`: mean RSS over the last tenth of the run / mean RSS over the second tenth.
- `pss_end_over_start`: the same of the proportional set size, which counts shared pages once.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import linregress
from scipy.stats import t as student_t

from experiments.harness.command import experiment_parser
from experiments.harness.launch import running, torchrun_command
from experiments.harness.record import Record, Row
from experiments.harness.samples import default_dataset

PROCESSES: Final = 2
KINDS: Final = {"in_use_bytes": "in use", "rss_bytes": "RSS", "pss_bytes": "PSS"}
SHOWN_EVERY_S: Final = 5.0
WARM_UP_SHARE: Final = 0.1
BLOCKS: Final = 10
"""Medians that the fit uses: neighbouring samples are too similar for a confidence interval, and the
short-lived memory of an evaluation or of a decoded row group is no growth."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, dataset=True).parse_args(arguments)
    settings = {
        "data.global_batch_size": 256,
        "data.train_days": [0],
        "train.seed": 0,
        "train.epochs": 1000,
        "train.max_steps": 40 if options.quick else 60_000,
        "train.log_every_steps": 10 if options.quick else 100,
        "train.evaluate_every_steps": 10 if options.quick else 1000,
        "train.device": "cpu",
    }
    record = Record(
        "memory_growth",
        {"recipe": "tiny", "processes": PROCESSES, **settings},
        seeds=[0],
        quick=options.quick,
    )
    folder = options.dataset or default_dataset(quick=options.quick)
    every_steps = 2 if options.quick else 20
    row = record.measure("run", partial(_train_watched, {**settings, "data.uri": str(folder)}, every_steps))
    return record.publish(figures_of(row["samples"]), draw)


def _train_watched(settings: dict[str, Any], every_steps: int) -> Row:
    """Train and return the memory samples of the workers, one every `every_steps` steps."""
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        pairs = {**settings, "train.run_folder": str(Path(scratch) / "runs")}.items()
        overrides = [f"{name}={json.dumps(value)}" for name, value in pairs]
        arguments = [scratch, str(every_steps), "--recipe", "tiny", "--set", *overrides]
        command = torchrun_command("experiments.memory_growth.worker", arguments, PROCESSES)
        with running(command, threads=1) as launch:
            while launch.process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    launch.process.wait(SHOWN_EVERY_S)
                for sample in _written(Path(scratch))[-1:]:
                    shown = (f"{name} {max(sample[kind]) / 1e6:.1f} MB" for kind, name in KINDS.items())
                    print(f"step {sample['step']}: {', '.join(shown)}", flush=True)
            launch.check_ended_well()
        return {"samples": _written(Path(scratch))}


def _written(folder: Path) -> list[Row]:
    """Read what the workers have written so far: for each step and kind of memory, one value per worker."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    lines = [map(json.loads, text[: text.rfind("\n") + 1].splitlines()) for text in texts]
    return [
        {"step": of_step[0]["step"], **{kind: [each[kind] for each in of_step] for kind in KINDS}}
        for of_step in zip(*lines, strict=False)  # a worker may be a line ahead
    ]


def block_medians(steps: Sequence[int], num_bytes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Thousands of steps and median bytes of each of the `BLOCKS` blocks of the second half."""
    places = np.array_split(np.arange(len(steps) // 2, len(steps)), BLOCKS)
    x = [float(np.mean(np.asarray(steps)[place])) / 1000 for place in places]
    return x, [float(np.median(np.asarray(num_bytes)[place])) for place in places]


def growth_per_1000_steps(steps: Sequence[int], num_bytes: Sequence[int]) -> tuple[float, float]:
    """Slope over the second half and half the width of its confidence interval, both in bytes.

    Args:
        steps: ascending.
        num_bytes: memory after each step.
    """
    fit = linregress(*block_medians(steps, num_bytes))
    return float(fit.slope), float(student_t.ppf(0.975, BLOCKS - 2) * fit.stderr)


def end_over_start(steps: Sequence[int], num_bytes: Sequence[int]) -> float:
    """Mean over the last tenth of the run / mean over the second tenth."""
    tenth = steps[-1] * WARM_UP_SHARE
    start = [value for step, value in zip(steps, num_bytes, strict=True) if tenth < step <= 2 * tenth]
    end = [value for step, value in zip(steps, num_bytes, strict=True) if step > steps[-1] - tenth]
    return mean(end) / mean(start)


def figures_of(samples: Sequence[Row]) -> dict[str, float]:
    """All figures.

    Args:
        samples: for each step and kind of memory, one value per worker.
    """
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


def draw(result: Row, folder: Path) -> None:
    """Draw the memory of both workers over the run, and the bytes in use that the fit goes through."""
    samples, figures = result["rows"][0]["samples"], result["figures"]
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    whole, closer = figure.subplots(2, 1, height_ratios=[1.4, 1])
    steps = [sample["step"] for sample in samples]
    for (kind, name), style in zip(KINDS.items(), ("-", "--", ":"), strict=True):
        for worker, values in enumerate(zip(*(sample[kind] for sample in samples), strict=True)):
            label = f"worker {worker}, {name}"
            whole.plot(steps, [value / 1e6 for value in values], style, color=f"C{worker}", label=label)
            if kind == "in_use_bytes":
                x, medians = block_medians(steps, values)
                above = [(each - medians[0]) / 1e3 for each in medians]
                closer.plot([1000 * each for each in x], above, "-o", markersize=4, label=f"worker {worker}")
    whole.set_ylim(bottom=0)
    whole.set(ylabel="MB")
    closer.legend(fontsize=8)
    whole.set_title("Host memory of a training run of two workers", fontsize=10)
    whole.legend(
        fontsize=8, ncols=3, title="in use: allocated and not freed; RSS: resident; PSS: shared pages split"
    )
    slope, reach = (figures[f"growth_bytes_per_1000_steps{end}"] for end in ("", "_ci"))
    closer.set(xlabel="training steps", ylabel="kB, since the first block")
    closer.set_title(
        f"In use, second half, medians of {BLOCKS} blocks: growth {slope:,.0f} bytes per 1,000 steps "
        f"(95 % interval {slope - reach:,.0f} to {slope + reach:,.0f})",
        fontsize=10,
    )
    figure.savefig(folder / "memory_growth.png", dpi=150)
