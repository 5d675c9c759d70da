"""Flags by which `cpr plan` says how many workers to rent (`--workers`)."""

# ruff: noqa: PLC0415 - the imports are slow, and only this command needs them

import argparse
from typing import TYPE_CHECKING, Final

from cpr.cli.job_flags import MIRROR, duration
from cpr.estimator.planning.estimator_inputs import FLAGS

if TYPE_CHECKING:
    from cpr.estimator.renting.offers import RentPlan, WorkerFailures

RENT: Final = {
    "batches": "--batches",
    "trials": "--trial",
    "price": "--price",
    "samples": "--samples",
    "target": "--target",
    "worker_fail": "--worker-fail",
}
"""The flag of each value besides `--workers`."""
SHARED: Final = ("O_save", "blocked_save", "O_load", "O_res", "link_gbps")
"""Values of other flags that are read, too."""


def add_rent_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the choice of workers."""
    rent = parser.add_argument_group(
        "how many workers to rent",
        "Instead of how often to save: time and money to a target by workers and batch, from short runs with "
        "train.measure_scaling=true. --save, --blocked, --load, --reschedule, --pls and --link are read, "
        "too; --link is the speed of the rented workers' links (default: as in the runs).",
    )
    add = rent.add_argument
    add(
        "--workers", dest="rented", type=int, nargs="+", metavar="N", help="numbers of workers to choose from"
    )
    add("--batches", type=int, nargs="+", metavar="B", help="global batches (default: those of the runs)")
    add("--trial", dest="trials", nargs="+", metavar="DIR", help="folders of the short runs")
    add("--price", type=float, metavar="MONEY", help="of a worker for an hour")
    add(
        "--target",
        metavar="METRIC=VALUE",
        help="to train to, such as auc=0.79, if some of the runs have reached it",
    )
    add("--samples", type=float, metavar="N", help="or: samples that the smallest batch of the runs needs")
    add(
        "--worker-fail",
        type=duration,
        metavar="TIME",
        help="mean time between failures of one worker; with --save, failures and saves are counted",
    )


def check_rent(options: argparse.Namespace) -> None:
    """Refuse combinations of flags that make no sense.

    Raises:
        ValueError: names the flags to leave out or to give.
    """
    given = [flag for name, flag in RENT.items() if getattr(options, name) is not None]
    if options.rented is None:
        if given:
            raise ValueError(
                f"{', '.join(given)}: about the number of workers to rent; give --workers, or leave out"
            )
        return
    others = {**FLAGS, **{name: f"--{name.replace('_', '-')}" for name in ("group_share", "group_nodes")}}
    others |= {name: flag for flag, name, *_ in MIRROR}
    others |= {"step_s": "--step", "slows_s": "--mirror-slows", "failures": "--failures"}
    unread = [
        flag for name, flag in others.items() if name not in SHARED and getattr(options, name) is not None
    ]
    unread += ["--run"] * bool(options.runs) + ["--mirror-apart"] * options.mirror_apart
    if unread:
        raise ValueError(f"--workers plans what to rent, and does not read {', '.join(unread)}: leave it out")
    needed = ("trials", "price")
    if missing := [RENT[name] for name in needed if getattr(options, name) is None]:
        raise ValueError(f"this is missing: {', '.join(missing)}. Give it with --workers")
    if (options.target is None) == (options.samples is None):
        raise ValueError(
            "how far to train is not clear: give --target METRIC=VALUE, or --samples N, one of them"
        )
    if (options.worker_fail is None) != (options.O_save is None):
        raise ValueError("--worker-fail and --save count failures together: give both, or neither")
    costs = {"blocked_save": "--blocked", "O_load": "--load", "O_res": "--reschedule"}
    unread = [flag for name, flag in costs.items() if getattr(options, name) is not None]
    if unread and options.worker_fail is None:
        raise ValueError(f"{', '.join(unread)}: costs of failures; give --worker-fail and --save, too")


def rent_plan(options: argparse.Namespace) -> tuple["RentPlan", list[str]]:
    """The plan that the flags ask for, and descriptions of the runs that it rests on.

    Raises:
        ValueError: a value is missing or impossible, or a run has not measured what is needed.
    """
    from cpr.cli.same_job import refuse_different
    from cpr.estimator.renting.offers import plan_rent
    from cpr.estimator.renting.samples import Target
    from cpr.estimator.renting.step_time import fit_step_time
    from cpr.estimator.renting.trial import Trial, samples_given, samples_to, traffic_of
    from cpr.report.records import read_run

    target = None if options.target is None else Target.parse(options.target)
    runs = [read_run(name) for name in options.trials]
    trials = [Trial.of(run.name, run.lines) for run in runs]
    refuse_different(runs)
    step_time = fit_step_time([trial.step for trial in trials], traffic_of(trials))
    plan = plan_rent(
        options.rented,
        options.batches or [trial.step.batch for trial in trials],
        step_time,
        samples_given(options.samples, trials) if target is None else samples_to(target, trials),
        options.price,
        _failures_of(options),
        None if options.link_gbps is None else _link(options.link_gbps),
    )
    return plan, ["; ".join([str(trial), *run.problems]) for trial, run in zip(trials, runs, strict=True)]


def _link(gbps: float) -> float:
    if not gbps > 0:
        raise ValueError(f"--link is {gbps:g} Gb/s; give a speed above 0")
    return gbps * 1e9 / 8


def _failures_of(options: argparse.Namespace) -> "WorkerFailures | None":
    from cpr.estimator.renting.offers import WorkerFailures

    if options.worker_fail is None:
        return None
    return WorkerFailures(
        T_fail=options.worker_fail,
        O_save=options.O_save,
        blocked_save=options.blocked_save,
        O_load=options.O_load or 0.0,
        O_res=options.O_res or 0.0,
        target_pls=options.pls,
    )
