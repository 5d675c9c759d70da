"""`cpr simulate`: simulates a job's failures for each recovery, and compares with the formulas."""

# ruff: noqa: PLC0415 - the imports are slow, and only this command needs them

import argparse
import json
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cpr.cli.command import FINE, Command
from cpr.cli.job_flags import (
    add_job_arguments,
    add_output_arguments,
    check_picture,
    groups_of,
    inputs_of,
    mirror_of,
)
from cpr.humanize import parse_duration

if TYPE_CHECKING:
    from cpr.estimator.failures.log import FailureLog
    from cpr.estimator.failures.log_report import ChosenDistribution

TRIALS: Final = 1000
WIDTH: Final = 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--interval",
        metavar="TIME",
        help="from save to save, of all recoveries (default: what `cpr plan` recommends for each)",
    )
    failures = parser.add_argument_group("when failures come")
    failures.add_argument(
        "--distribution",
        choices=("exponential", "gamma", "weibull", "recorded"),
        help="of the time between failures; recorded: the times of the log, in random order "
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
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help="runs of each recovery (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the failures (default: %(default)s)")
    add_output_arguments(parser, "overheads of all recoveries")


def _simulate(options: argparse.Namespace) -> int:
    from cpr.estimator.failures.arrivals import FailureModel
    from cpr.estimator.simulation.comparison import compare
    from cpr.estimator.simulation.comparison_text import as_text

    check_picture(options.plot)
    inputs = inputs_of(options)
    chosen = _distribution(options, inputs.log)
    group_share, group_nodes = groups_of(options, inputs.job)
    comparison = compare(
        replace(inputs.job, nodes_lost=min(1.0, inputs.job.nodes_lost)),
        FailureModel(
            distribution=chosen.distribution,
            shape=chosen.shape,
            recorded_s=tuple(inputs.log.gaps_s) if inputs.log and chosen.distribution == "recorded" else (),
            scope="node" if options.of_nodes else "job",
            group_share=group_share,
            group_nodes=group_nodes,
        ),
        target_pls=options.pls,
        interval_s=None if options.interval is None else parse_duration(options.interval),
        num_trials=options.trials,
        seed=options.seed,
        mirror=mirror_of(options, inputs, group_nodes),
    )
    if options.json:
        failures = {
            "distribution": chosen.distribution,
            "shape": chosen.shape,
            "told": chosen.explanation,
            "scope": comparison.config.failures.scope,
        }
        print(json.dumps({"job": inputs.to_json(), "failures": failures, **comparison.to_json()}, indent=1))
    else:
        lines = textwrap.wrap(chosen.explanation, WIDTH, initial_indent="  ", subsequent_indent="  ")
        print("\n".join([str(inputs), *lines, "", as_text(comparison)]))
    if options.plot:
        from cpr.estimator.simulation.comparison_plot import draw

        draw(comparison, options.plot)
        if not options.json:
            print(f"drawn in {options.plot}")
    return FINE


def _distribution(options: argparse.Namespace, log: "FailureLog | None") -> "ChosenDistribution":
    """The distribution of times between failures: as given, or fitted to the log."""
    from cpr.estimator.failures.log_report import ChosenDistribution, choose_distribution

    name, shape = options.distribution, options.shape
    if shape is not None and name not in {"gamma", "weibull"}:
        raise ValueError("--shape is that of --distribution gamma or weibull: give one of them")
    if shape is not None:
        return ChosenDistribution(distribution=name, shape=shape, explanation="")
    if log is not None and log.num_failures:
        return choose_distribution(log, name)
    if name == "recorded":
        raise ValueError("there are no recorded failures: give a log of them by --failures, or --run")
    if name in {"gamma", "weibull"}:
        raise ValueError(f"--distribution {name} needs its --shape, or a log to fit it to: --failures CSV")
    return ChosenDistribution(distribution="exponential", explanation="")


SIMULATE: Final = Command(
    name="simulate",
    help="Simulate a job's failures for each recovery, and compare with the formulas.",
    add_arguments=_add_arguments,
    run=_simulate,
)
