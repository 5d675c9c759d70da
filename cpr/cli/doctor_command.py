"""`cpr doctor`: checks a node, and the links between nodes, before a job."""

import argparse
import json
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
        "--nodes", type=int, default=1, metavar="N", help="check the links between N nodes that all run this"
    )
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="of this node: 0 to N - 1")
    parser.add_argument("--rdzv", default="", metavar="HOST:PORT", help="where they meet: on node 0")
    parser.add_argument(
        "--wait", default="60s", metavar="TIME", help="for other nodes (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def _run(options: argparse.Namespace) -> int:
    address, _, port = options.rdzv.rpartition(":")
    if options.nodes > 1 and not (address and port.isdigit() and 0 <= options.node_rank < options.nodes):
        raise ValueError(
            "to check links, give --nodes N, --node-rank 0 to N - 1, and --rdzv HOST:PORT of node 0"
        )
    host, found = socket.gethostname(), []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # files of a check are deleted
    try:
        for finding in _findings(options, address, port):
            found.append(finding)
            if not options.json:  # at once, as a library may end the process in the next check
                print(f"{host}: {finding}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        print(json.dumps({"host": host, "findings": [asdict(each) for each in found]}, indent=1))
    return BAD if any(each.state == "PROBLEM" for each in found) else FINE


def _findings(options: argparse.Namespace, address: str, port: str) -> Iterator["Finding"]:
    from cpr.doctor.node import node_findings  # noqa: PLC0415  # imported late, as it is slow

    yield from node_findings(parse_size(options.memory) if options.memory else None, options.checkpoint)
    if options.nodes > 1:
        from cpr.doctor.network import network_findings  # noqa: PLC0415  # imports torch
        from cpr.rendezvous.launcher_env import LauncherEnv  # noqa: PLC0415

        place = {"rank": options.node_rank, "world_size": options.nodes, "of_agent": False}
        env = LauncherEnv(address=address, port=int(port), **place)
        yield from network_findings(env, timedelta(seconds=parse_duration(options.wait)), options.checkpoint)


DOCTOR: Final = Command(
    name="doctor",
    help="Check a node, and the links between nodes, before a job: each line says ok, or what to change.",
    add_arguments=_add_arguments,
    run=_run,
)
