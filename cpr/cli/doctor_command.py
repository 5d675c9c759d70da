"""`cpr doctor`: checks a node, and the links between nodes, before a job."""

import argparse
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from cpr.cli.command import BAD, FINE, Command
from cpr.humanize import parse_duration, parse_size

if TYPE_CHECKING:
    from cpr.doctor.finding import Finding

DEFAULT_WAIT: Final = "60s"
LEAST_WAIT_S: Final = 1.0
MOST_PORT: Final = 65_535


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="URI",
        help="checkpoint directory of the job: whether it can be written, and whether all nodes share it",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="shared memory that the job takes on this node: 200GB"
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="check the links between N nodes that all run this"
    )
    parser.add_argument("--node-rank", type=int, metavar="R", help="of this node: 0 to N - 1")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where they meet: on node 0")
    parser.add_argument("--wait", metavar="TIME", help=f"for other nodes (default: {DEFAULT_WAIT})")
    parser.add_argument("--json", action="store_true", help="for machines")


def _run(options: argparse.Namespace) -> int:
    _check(options)
    host, found = socket.gethostname(), []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # files of a check are deleted
    try:
        for finding in _findings(options):
            found.append(finding)
            if not options.json:  # at once, as a library may end the process in the next check
                print(f"{host}: {finding}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        print(json.dumps({"host": host, "findings": [asdict(each) for each in found]}, indent=1))
    return BAD if any(each.state == "PROBLEM" for each in found) else FINE


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError, which says what to give, for options that are incomplete or would be ignored."""
    if options.checkpoint == "":
        raise ValueError("--checkpoint is empty: give the checkpoint directory of the job, or leave it out")
    if options.wait is not None and parse_duration(options.wait) < LEAST_WAIT_S:
        raise ValueError(f"--wait {options.wait} is too short for other nodes to answer: give 1s or more")
    if options.nodes == 1 or [options.nodes, options.node_rank, options.rdzv, options.wait] == [None] * 4:
        return
    host, _, port = (options.rdzv or "").rpartition(":")
    has_place = host and port.isdecimal() and 0 < int(port) <= MOST_PORT
    has_rank = options.node_rank is not None and 0 <= options.node_rank < (options.nodes or 0)
    if not (has_place and has_rank):
        raise ValueError(
            "to check links, give --nodes N, --node-rank 0 to N - 1 of this node, and --rdzv HOST:PORT of "
            f"node 0 with a port of 1 to {MOST_PORT}; to check this node alone, leave them and --wait out"
        )


def _findings(options: argparse.Namespace) -> Iterator["Finding"]:
    # torch reads this when it is imported; by default, its stack traces of C++ stand between the findings
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from cpr.doctor.node import node_findings  # noqa: PLC0415  # imported late, as it is slow
    from cpr.doctor.storage import no_new_folders  # noqa: PLC0415

    with no_new_folders(options.checkpoint):
        yield from node_findings(parse_size(options.memory) if options.memory else None, options.checkpoint)
        if (options.nodes or 1) > 1:
            from cpr.doctor.network import network_findings  # noqa: PLC0415  # imports torch
            from cpr.rendezvous.launcher_env import LauncherEnv  # noqa: PLC0415

            address, _, port = options.rdzv.rpartition(":")
            place = {"rank": options.node_rank, "world_size": options.nodes, "of_agent": False}
            env = LauncherEnv(address=address, port=int(port), **place)
            timeout = timedelta(seconds=parse_duration(options.wait or DEFAULT_WAIT))
            yield from network_findings(env, timeout, options.checkpoint)


DOCTOR: Final = Command(
    name="doctor",
    help="Check a node, and the links between nodes, before a job: each line says ok, or what to change.",
    add_arguments=_add_arguments,
    run=_run,
)
