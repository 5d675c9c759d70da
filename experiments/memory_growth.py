"""Whether training's host memory grows: `python -m experiments.memory_growth [DATASET] [--quick]`.

The `tiny` recipe is trained by its own command, `torchrun ... -m dlrm.train`, for 10,000 small steps over
many epochs of one day, with an evaluation every 1,000 steps. From outside, the memory of each worker is
read every 100 steps. Figures, of the worker that grew most:

- `growth_bytes_per_1000_steps`: slope of a least squares fit to the resident set size (RSS) over the second
  half of the run, with `..._ci`, half the width of its 95 % confidence interval.
- `rss_end_over_start`: mean RSS over the last 1,000 steps / mean RSS over the 1,000 steps after a warm-up
  of 1,000.
- `pss_end_over_start`: the same of the proportional set size, which counts shared pages once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import psutil
from matplotlib.figure import Figure
from scipy.stats import linregress
from scipy.stats import t as student_t

from experiments.launch import check_ended_well, running, torchrun_command
from experiments.precision import CONFIDENCE, default_dataset
from experiments.record import Record, Row

PROCESSES: Final = 2
POLL_S: Final = 0.02
WARM_UP_SHARE: Final = 0.1
BLOCKS: Final = 10
"""Averages that the fit uses: neighbouring samples are too much alike for a confidence interval."""


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
        "train.max_steps": 280 if options.quick else 10_000,
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
    """Train, and read the workers' memory whenever there is a new line of metrics."""
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        runs = Path(scratch) / "runs"
        pairs = {**settings, "train.run_folder": str(runs)}.items()
        overrides = [f"{name}={json.dumps(value)}" for name, value in pairs]
        command = torchrun_command("dlrm.train", ["--recipe", "tiny", "--set", *overrides], PROCESSES)
        samples: list[Row] = []
        with (
            tempfile.TemporaryFile("w+") as output,
            running(command, threads=1, output=output) as launcher,
        ):
            for step in _steps(runs, launcher):
                workers = _workers(launcher)
                if len(workers) == PROCESSES:
                    samples.append({"step": step, **_memory_bytes(workers)})
                    print(f"step {step}: RSS {max(samples[-1]['rss_bytes']) / 1e6:.1f} MB", flush=True)
            check_ended_well(launcher, output)
    return {"samples": samples}


def _steps(runs: Path, launcher: "subprocess.Popen[bytes]") -> Iterator[int]:
    """The step of each new line of training metrics, until the launcher ends."""
    seen = 0
    while launcher.poll() is None:
        time.sleep(POLL_S)
        for path in runs.glob("*/metrics.jsonl"):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()
            new, seen = whole[seen:], len(whole)
            steps = [line["step"] for line in map(json.loads, new) if line["kind"] == "train"]
            yield from steps[-1:]


def _workers(launcher: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The workers, in the order of their start: their command names the module, the helpers' do not."""
    try:
        children = psutil.Process(launcher.pid).children()
        return [child for child in children if "dlrm.train" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def _memory_bytes(workers: Iterable[psutil.Process]) -> dict[str, list[int]]:
    found = [worker.memory_full_info() for worker in workers]
    return {"rss_bytes": [each.rss for each in found], "pss_bytes": [each.pss for each in found]}


def growth_per_1000_steps(steps: Sequence[int], num_bytes: Sequence[int]) -> tuple[float, float]:
    """Slope over the second half and half the width of its confidence interval, both in bytes.

    Args:
        steps: ascending.
        num_bytes: memory after each of them.
    """
    half = len(steps) // 2
    places = np.array_split(np.arange(half, len(steps)), BLOCKS)
    x = [float(np.mean(np.asarray(steps)[place])) / 1000 for place in places]
    y = [float(np.mean(np.asarray(num_bytes)[place])) for place in places]
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

    slope, reach = max(growth_per_1000_steps(steps, worker) for worker in of_workers("rss_bytes"))
    return {
        "growth_bytes_per_1000_steps": slope,
        "growth_bytes_per_1000_steps_ci": reach,
        "rss_end_over_start": max(end_over_start(steps, worker) for worker in of_workers("rss_bytes")),
        "pss_end_over_start": max(end_over_start(steps, worker) for worker in of_workers("pss_bytes")),
    }


def _draw(samples: Sequence[Row], figures: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    steps = [sample["step"] for sample in samples]
    for kind, style in (("rss_bytes", "-"), ("pss_bytes", "--")):
        for worker, values in enumerate(zip(*(sample[kind] for sample in samples), strict=True)):
            label = f"worker {worker}, {kind.removesuffix('_bytes').upper()}"
            axes.plot(steps, [value / 1e6 for value in values], style, color=f"C{worker}", label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training steps")
    axes.set_ylabel("MB")
    slope, reach = (figures[f"growth_bytes_per_1000_steps{end}"] / 1e3 for end in ("", "_ci"))
    axes.set_title(
        f"Host memory of a training run (second half: {slope:+.0f} ± {reach:.0f} kB per 1,000 steps)",
        fontsize=10,
    )
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
