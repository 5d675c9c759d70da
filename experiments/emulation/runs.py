"""Measures many emulated runs in two processes, keeps each on disk at once, and shows the time left.

The runs are stored apart from the results (`runs/emulation`), so that experiments share them: a run is valid
as long as its code, its data and the versions of the packages are the same. An experiment that is
interrupted, or started again with more seeds, measures only the missing runs.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, Final

from tqdm import tqdm

from cpr.priority import PriorityConfig
from data.dataset import read_manifest
from dlrm.launch.files import replace_text
from experiments.emulation.data import DEFAULT_COVERING, default_dataset, skewed_dataset
from experiments.emulation.emulation import Run
from experiments.emulation.worker import EmulatedWorkload, emulate, start
from experiments.harness.command import experiment_parser
from experiments.harness.launch import ROOT
from experiments.harness.record import QUICK, RESULTS, Record, Row, finished_result, versions
from experiments.harness.samples import identity_of

PROCESSES: Final = 2
CODE: Final = (
    *(f"{package}/**/*.py" for package in ("cpr", "data", "dlrm")),
    "dlrm/recipes/tiny.toml",
    *(f"experiments/emulation/{module}.py" for module in ("data", "emulation", "worker")),
    "experiments/harness/training.py",
)
"""The files that decide how a run ends: a run is measured again when one of them changes."""
KEPT: Final = ROOT / "runs" / "emulation"
OTHERS: Final = ROOT / "runs" / "other_data"
"""Where results of a user's data are stored; the report is about the default data."""
LEAVE_S: Final = 5.0
"""How long a process whose parent has died may take to clean up."""
QUICK_STEPS: Final = 8
QUICK_SEEDS: Final = 2

Plan = Callable[[int], Sequence[Run]]
"""All runs of a seed, the most important first."""


def run_experiment(
    name: str,
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    plan: Plan,
    seeds: int,
    figures_of: Callable[[Sequence[Row]], Mapping[str, float | None]],
    draw: Callable[[Row, Path], object],
    notes: Mapping[str, str] | None = None,
) -> int:
    """Measure an experiment's runs, store its figures, draw and print them; the exit code.

    Args:
        name: of the experiment.
        arguments: the command line; None: that of this process.
        description: docstring of the experiment's module, whose first line describes the command.
        plan: the runs of a seed.
        seeds: how many by default.
        figures_of: makes the figures of the rows.
        draw: draws the stored result into a folder.
        notes: why figures are missing, by name.
    """
    record = measure_experiment(name, arguments, description=description, plan=plan, seeds=seeds)
    return record.publish(figures_of(record.rows), draw, notes)


def measure_experiment(
    name: str, arguments: Sequence[str] | None, *, description: str | None, plan: Plan, seeds: int
) -> Record:
    """Parse an experiment's command line and measure its runs, seed by seed; the record is not finished."""
    parser = _parser(description, seeds)
    options = _parse(parser, arguments)
    folder = QUICK if options.quick else OTHERS if options.dataset else RESULTS
    if options.figures:
        try:
            return _stored(name, folder)
        except ValueError as error:
            parser.error(str(error))
    workload = EmulatedWorkload(
        dataset=str(options.dataset or default_dataset(quick=options.quick)),
        max_steps=QUICK_STEPS if options.quick else 0,
        covering=PriorityConfig.covering if options.dataset else DEFAULT_COVERING,
    )
    chosen = range(QUICK_SEEDS if options.quick else options.seeds)
    runs = [
        run
        for seed in chosen
        for run in plan(seed)
        if run.top_coverage is None or options.dataset is None  # the skew of a user's data is given
    ]
    config = {**asdict(workload), "dataset": identity_of(workload.dataset), "samples_tested": "the last day"}
    record = Record(name, config, seeds=list(chosen), folder=folder)
    rows = measure(runs, workload, QUICK / "emulation" if options.quick else KEPT)
    for run in runs:
        record.measure(run.name, lambda run=run: rows[run])  # type: ignore[misc]
    return record


def _stored(name: str, folder: Path) -> Record:
    """The runs of a stored result, whatever code, data and machine made them; each row names its commit.

    Raises:
        ValueError: there is none that is finished.
    """
    path = folder / f"{name}.json"
    stored = finished_result(path)
    if stored is None:
        raise ValueError(f"{path} is not there or not finished: measure it first, without --figures")
    record = Record(name, stored["config"], seeds=stored["seeds"], folder=folder)
    record.keep_all()
    return record


def measure(runs: Sequence[Run], workload: EmulatedWorkload, kept: Path) -> dict[Run, Row]:
    """The rows of these runs: those that are kept already, and the others measured now, in their order.

    Args:
        runs: what to measure; repeated ones are measured once.
        workload: what they share.
        kept: folder of the runs that were measured before.
    """
    folder = kept / _digest(workload)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {run: folder / f"{hashlib.sha256(run.name.encode()).hexdigest()[:24]}.json" for run in runs}
    missing = [run for run, path in paths.items() if not path.exists()]
    for top_coverage in sorted({run.top_coverage for run in missing if run.top_coverage is not None}):
        skewed_dataset(Path(workload.dataset), top_coverage)  # by one process, before several read it
    with tqdm(total=len(paths), initial=len(paths) - len(missing), unit="run", smoothing=0.1) as bar:
        for run, outcome in _emulated(missing, workload):
            replace_text(paths[run], json.dumps({**asdict(run), **outcome}))
            bar.write(f"{run.name}: AUC {outcome['auc']:.5f}, PLS {outcome['pls']:.3f}")
            bar.update()
    return {run: json.loads(path.read_text()) for run, path in paths.items()}


def _parser(description: str | None, seeds: int) -> argparse.ArgumentParser:
    parser = experiment_parser(description, figures=True)
    add = parser.add_argument
    add(
        "dataset",
        nargs="?",
        type=Path,
        help="prepared data, whose result is stored in runs/other_data; default datasets/emulation, made if "
        "absent",
    )
    add("--seeds", type=int, default=seeds, help="how many; those measured before are not measured again")
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one run says nothing about the next")
    if options.dataset is not None:
        try:
            read_manifest(str(options.dataset))
        except ValueError as error:
            parser.error(str(error))
        except NotADirectoryError:
            parser.error(
                f"{options.dataset} is a file, and prepared data is a folder. Make one with "
                "`python -m data.prepare`"
            )
    return options


def _emulated(runs: Sequence[Run], workload: EmulatedWorkload) -> Iterator[tuple[Run, Row]]:
    """Runs and their outcomes, as they end."""
    if not runs:
        return
    with _processes(min(PROCESSES, os.cpu_count() or 1, len(runs))) as pool:
        waiting: dict[Future[dict[str, Any]], Run] = {
            pool.submit(emulate, run, workload): run for run in runs
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _start() -> None:
    """Prepare a process, and make it end together with its parent, however that ends."""
    start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves blocks, so that no files are left
    Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by another one"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)
    os._exit(1)


@contextmanager
def _processes(number: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes with one thread each; waiting runs are dropped when the block ends early."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_start)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _digest(workload: EmulatedWorkload) -> str:
    """A digest of everything besides the run that decides how it ends."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    shared: Mapping[str, Any] = {**asdict(workload), "dataset": identity_of(workload.dataset)}
    digest.update(json.dumps([shared, versions()], sort_keys=True).encode())
    return digest.hexdigest()[:24]
