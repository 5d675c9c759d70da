"""`cpr simulate`: what failures cost a job, simulated, beside what the formulas say."""

# ruff: noqa: PLC0415

import argparse
import json
import math
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from cpr.cli.command import FINE, Command
from cpr.cli.job_flags import add_job_arguments, inputs_of
from cpr.cli.plot_option import add_plot_argument, check_picture
from cpr.humanize import parse_duration

if TYPE_CHECKING:
    from cpr.estimator.failures.arrivals import FailureModel
    from cpr.estimator.failures.choice import Drawn
    from cpr.estimator.failures.log import FailureLog
    from cpr.estimator.planning.formulas import Job

TRIALS: Final = 1000
WIDTH: Final = 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--interval",
        metavar="TIME",
        help="from save to save, of both (default: what `cpr plan` says of each)",
    )
    failures = parser.add_argument_group("how failures come")
    failures.add_argument(
        "--distribution",
        choices=("exponential", "gamma", "weibull", "recorded"),
        help="of the time between them; recorded: those of the log again, in random order "
        "(default: what fits the log best, recorded if nothing does; without a log exponential)",
    )
    failures.add_argument(
        "--shape",
        type=float,
        help="of gamma and weibull (default: fitted to the log); below 1 failures come in bursts",
    )
    failures.add_argument(
        "--of-nodes", action="store_true", help="each node fails by itself (default: the job has one clock)"
    )
    failures.add_argument(
        "--group-share", type=float, metavar="SHARE", help="of failures, that take a group of nodes at once"
    )
    failures.add_argument("--group-nodes", type=int, metavar="N", help="nodes of a group, such as a rack")
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help="runs of each recovery (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the failures (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything, for machines")
    add_plot_argument(parser, "it")


def _simulate(options: argparse.Namespace) -> int:
    from cpr.estimator.simulation.comparison import compare
    from cpr.estimator.simulation.comparison_text import as_text

    check_picture(options.plot)
    inputs = inputs_of(options)
    drawn = _drawn(options, inputs.log)
    failures = _model(options, drawn, inputs.job, inputs.log)
    job = replace(inputs.job, nodes_lost=min(1.0, inputs.job.nodes_lost))
    comparison = compare(
        job,
        failures,
        target_pls=options.pls,
        interval_s=None if options.interval is None else parse_duration(options.interval),
        num_trials=options.trials,
        seed=options.seed,
    )
    if options.json:
        about = {"job": inputs.to_json(), "failures": {**asdict(drawn), "scope": failures.scope}}
        print(json.dumps({**about, **comparison.to_json()}, indent=1))
    else:
        told = textwrap.wrap(drawn.told, WIDTH, initial_indent="  ", subsequent_indent="  ")
        print("\n".join([str(inputs), *told, "", as_text(comparison)]))
    if options.plot:
        from cpr.estimator.simulation.comparison_plot import draw

        draw(comparison, options.plot)
        if not options.json:
            print(f"drawn in {options.plot}")
    return FINE


def _model(
    options: argparse.Namespace, drawn: "Drawn", job: "Job", log: "FailureLog | None"
) -> "FailureModel":
    """How failures come, from the flags and the log."""
    from cpr.estimator.failures.arrivals import FailureModel

    group_share, group_nodes = _groups(options, job)
    return FailureModel(
        distribution=drawn.distribution,
        shape=drawn.shape,
        recorded_s=tuple(log.gaps_s) if log and drawn.distribution == "recorded" else (),
        scope="node" if options.of_nodes else "job",
        group_share=group_share,
        group_nodes=group_nodes,
    )


def _drawn(options: argparse.Namespace, log: "FailureLog | None") -> "Drawn":
    """The distribution of times between failures, given or after the log."""
    from cpr.estimator.failures.choice import Drawn, choose

    name, shape = options.distribution, options.shape
    if shape is not None and name not in {"gamma", "weibull"}:
        raise ValueError("--shape is that of --distribution gamma or weibull: give one of them")
    if shape is not None:
        return Drawn(distribution=name, shape=shape, told="")
    if log is not None and log.num_failures:
        return choose(log, name)
    if name == "recorded":
        raise ValueError("there are no recorded failures: give a log of them by --failures, or --run")
    if name in {"gamma", "weibull"}:
        raise ValueError(f"--distribution {name} needs its --shape, or a log to fit it to: --failures CSV")
    return Drawn(distribution="exponential", told="")


def _groups(options: argparse.Namespace, job: "Job") -> tuple[float, int]:
    """Share of failures that take several nodes, and how many; those that runs measured if none are given."""
    if (options.group_share is None) != (options.group_nodes is None):
        raise ValueError("--group-share and --group-nodes belong together: give both or neither")
    if options.group_share is not None:
        return options.group_share, options.group_nodes
    if job.nodes_lost <= 1:
        return 0.0, 1
    size = math.ceil(job.nodes_lost)
    return (job.nodes_lost - 1) / (size - 1), size


SIMULATE: Final = Command(
    name="simulate",
    help="Simulate a job's failures for both recoveries, and compare with the formulas.",
    add_arguments=_add_arguments,
    run=_simulate,
)
