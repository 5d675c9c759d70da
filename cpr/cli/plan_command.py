"""`cpr plan`: recommends full or partial recovery and a save interval, or how many workers to rent."""

# ruff: noqa: PLC0415 - the imports are slow, and only this command needs them

import argparse
import json
from dataclasses import replace
from typing import Final

from cpr.cli.command import FINE, Command
from cpr.cli.job_flags import (
    add_job_arguments,
    add_output_arguments,
    check_picture,
    groups_of,
    inputs_of,
    mirror_of,
)
from cpr.cli.rent_flags import add_rent_arguments, check_rent, rent_plan


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--ratio",
        type=float,
        default=0.125,
        metavar="R",
        help="share of the rows in a priority save; 1: full saves only (default: %(default)s)",
    )
    add_rent_arguments(parser)
    add_output_arguments(parser, "overhead against interval, or hours against money")


def _run(options: argparse.Namespace) -> int:
    check_picture(options.plot)
    check_rent(options)
    return _recover(options) if options.rented is None else _rent(options)


def _rent(options: argparse.Namespace) -> int:
    from cpr.estimator.renting.rent_text import as_text

    plan, trials = rent_plan(options)
    print(
        json.dumps({**plan.to_json(), "trials": trials}, indent=1) if options.json else as_text(plan, trials)
    )
    if options.plot:
        from cpr.estimator.renting.rent_plot import plot

        plot(plan, options.plot)
        if not options.json:
            print(f"\nDrawn: {options.plot}")
    return FINE


def _recover(options: argparse.Namespace) -> int:
    from cpr.estimator.failures.arrivals import FailureModel
    from cpr.estimator.failures.log_report import report_on
    from cpr.estimator.planning import mirror_text
    from cpr.estimator.planning.mirror_plan import plan_mirror
    from cpr.estimator.planning.recommend import recommend
    from cpr.estimator.planning.recommend_text import as_text

    inputs = inputs_of(options)
    group_share, group_nodes = groups_of(options, inputs.job)
    groups = FailureModel(group_share=group_share, group_nodes=group_nodes)
    job = replace(inputs.job, nodes_lost=min(1.0, inputs.job.nodes_lost) * groups.mean_nodes)
    mirror = mirror_of(options, inputs, group_nodes)
    what = recommend(job, options.pls, options.ratio)
    plans = None if mirror is None else plan_mirror(job, mirror, groups, options.pls)
    failures = None if inputs.log is None else report_on(inputs.log)
    if options.json:
        about = {"inputs": inputs.to_json(), "failures": failures.to_json() if failures else None}
        about["mirror"] = plans.to_json() if plans else None
        print(json.dumps({**what.to_json(), **about}, indent=1))
    else:
        print(as_text(what, inputs, failures))
        if plans:
            print(f"\n{mirror_text.as_text(plans)}")
    if options.plot:
        from cpr.estimator.planning.recommend_plot import plot

        plot(what, options.plot, failures)
        if not options.json:
            print(f"\nDrawn: {options.plot}")
    return FINE


PLAN: Final = Command(
    name="plan",
    help="Say how often to save and how to recover, and why: from a job's times, or from what runs measured. "
    "With --workers: how many workers to rent, and with which batch.",
    add_arguments=_add_arguments,
    run=_run,
)
