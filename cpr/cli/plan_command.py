"""`cpr plan`: recommends full or partial recovery, and a save interval."""

# ruff: noqa: PLC0415 - the imports are slow, and only this command needs them

import argparse
import json
from typing import Final

from cpr.cli.command import FINE, Command
from cpr.cli.job_flags import add_job_arguments, add_output_arguments, check_picture, inputs_of


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--ratio",
        type=float,
        default=0.125,
        metavar="R",
        help="share of the rows in a priority save; 1: full saves only (default: %(default)s)",
    )
    add_output_arguments(parser, "overhead against interval")


def _run(options: argparse.Namespace) -> int:
    from cpr.estimator.failures.log_report import report_on
    from cpr.estimator.planning.recommend import recommend
    from cpr.estimator.planning.recommend_text import as_text

    check_picture(options.plot)
    inputs = inputs_of(options)
    what = recommend(inputs.job, options.pls, options.ratio)
    failures = None if inputs.log is None else report_on(inputs.log)
    if options.json:
        about = {"inputs": inputs.to_json(), "failures": failures.to_json() if failures else None}
        print(json.dumps({**what.to_json(), **about}, indent=1))
    else:
        print(as_text(what, inputs, failures))
    if options.plot:
        from cpr.estimator.planning.recommend_plot import plot

        plot(what, options.plot, failures)
        if not options.json:
            print(f"\nDrawn: {options.plot}")
    return FINE


PLAN: Final = Command(
    name="plan",
    help="Say how often to save and how to recover, and why: from a job's times, or from what runs measured.",
    add_arguments=_add_arguments,
    run=_run,
)
