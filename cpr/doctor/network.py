"""Checks between nodes: they meet as workers do, and try what training uses."""

import os
import platform
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from cpr.doctor.finding import Finding, problem, warning
from cpr.doctor.interfaces import check_interfaces
from cpr.doctor.links import check_links
from cpr.doctor.meeting import Meeting
from cpr.doctor.shared_directory import check_shared_directory
from cpr.errors import RendezvousError
from cpr.rendezvous.join import WorkerGroup, init_process_group, join_from
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.rank_assignment import WorkerInfo
from cpr.versions import FBGEMM_BUILDS, installed_version

ROOT: Final = Path(__file__).parents[2]
"""Where this project's packages are, in a clone or installed."""
CODE: Final = ("cpr", "data", "dlrm")
PACKAGES: Final = ("torch", "torchrec", *FBGEMM_BUILDS.values(), "numpy", "pyarrow")
TOLERATED: Final = frozenset({"Python", "numpy", "pyarrow"})
"""What may differ between nodes at a risk; with the rest the same job is not the same program."""


def network_findings(env: LauncherEnv, timeout: timedelta, uri: str | None) -> Iterator[Finding]:
    """Meet the other nodes, and check what is between them.

    Args:
        env: of one process for each node; rank 0 hosts the store.
        timeout: for the others to come, and for each answer and transfer.
        uri: checkpoint directory that all nodes must share; None: not checked, unless another node has one.
    """
    name = socket.gethostname()
    try:
        own = env.own_address()
        group = join_from(env, WorkerInfo(restarted=False, host=name, pid=os.getpid()), timeout)
    except ValueError as error:
        yield problem("rendezvous", f"no route to {env.address}: {error.__cause__}", "correct --rdzv")
        return
    except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
        advice = (
            f"run `cpr doctor` on all {env.world_size} nodes at the same time, each with its own "
            f"--node-rank and the same --nodes, number 0 on {env.address}; open all TCP ports between the "
            "nodes in their firewalls, as workers and gloo listen at free ones; and end another program that "
            f"has port {env.port} there"
        )
        yield problem("rendezvous", _first_line(error), advice)
        return
    yield Finding("rendezvous", f"{env.world_size} nodes at {env.address}:{env.port}; this is {own.name}")
    meeting = Meeting(group.store, group.rank, tuple(info.host for info in group.infos))
    try:
        yield from check_equality(meeting, versions_here(), torch.cuda.device_count())
        if any(meeting.gather("--checkpoint", uri)):
            yield check_shared_directory(meeting, uri)
        found = list(check_interfaces(meeting))
        yield from found
        if all(each.state == "ok" for each in found):
            yield from _with_gloo(group, meeting, timeout)
        meeting.leave()
    except RendezvousError as error:
        yield problem("nodes", str(error), "see what its own `cpr doctor` says, and run all of them again")


def check_equality(meeting: Meeting, versions: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    """Check that all nodes have the same versions and as many GPUs; raises as `Meeting.gather`.

    Args:
        meeting: the nodes.
        versions: of this node, see `versions_here`.
        num_gpus: of this node.
    """
    nodes = meeting.gather("list of versions", [versions, num_gpus])
    names = [name for name in versions if any(theirs.get(name) != versions[name] for theirs, _ in nodes)]
    if names:
        text = "; ".join(
            f"{meeting.name(rank)} has "
            + ", ".join(f"{name} {nodes[rank][0].get(name, '(none)')}" for name in names)
            for rank in range(len(nodes))
        )
        finding = warning if TOLERATED.issuperset(names) else problem
        yield finding("same versions", text, "install the same versions on all nodes")
    others = [(meeting.name(rank), nodes[rank][1]) for rank in meeting.others]
    if different := [f"{node} {count}" for node, count in others if count != num_gpus]:
        text = f"this node has {num_gpus} GPUs, {', '.join(different)}"
        yield warning("same GPUs", text, "look at the driver and CUDA_VISIBLE_DEVICES where there are fewer")
    if all(node == nodes[0] for node in nodes):
        text = f"all nodes have the same {', '.join(versions)}, and {num_gpus} GPUs"
        yield Finding("same versions", text)


def versions_here(root: Path = ROOT) -> dict[str, str]:
    """Versions that all nodes should share, by name; this project's code by a hash of its modules."""
    code = sha256()
    for package in CODE:
        for path in sorted((root / package).rglob("*.py")):
            code.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {
        "Python": platform.python_version(),
        **{name: installed_version(name) or "(none)" for name in PACKAGES},
        f"code of {', '.join(CODE)}": code.hexdigest()[:12],
    }


def _with_gloo(group: WorkerGroup, meeting: Meeting, timeout: timedelta) -> Iterator[Finding]:
    """Check links and NCCL in a process group."""
    try:
        init_process_group(group, "gloo", timeout)
        yield from check_links(meeting)
        yield from _try_nccl(timeout)
    except RuntimeError as error:
        advice = (
            "see whether another node has ended; give slow links more time with --wait; open all TCP ports "
            "between the nodes; where only large transfers hang, give all interfaces and switches on the way "
            "the same MTU (`ping -M do -s 8972 HOST` must pass for an MTU of 9000)"
        )
        yield problem("links", _first_line(error), advice)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _try_nccl(timeout: timedelta) -> Iterator[Finding]:
    """Sum a number over the first GPUs of all nodes; nothing if a node has none."""
    num_gpus = torch.tensor(torch.cuda.device_count())
    dist.all_reduce(num_gpus, dist.ReduceOp.MIN)
    if not num_gpus:
        return
    # a failure must raise here: by default NCCL's watchdog ends the process
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    advice = "run with NCCL_DEBUG=INFO, and choose the network by NCCL_SOCKET_IFNAME"
    try:
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total, group=dist.new_group(backend="nccl", timeout=timeout))
        if int(total) == dist.get_world_size():
            yield Finding("NCCL", f"sums over {int(total)} nodes")
        else:
            yield problem("NCCL", f"a sum over {dist.get_world_size()} nodes gives {int(total)}", advice)
    except RuntimeError as error:
        yield problem("NCCL", _first_line(error), advice)


def _first_line(error: RuntimeError | OSError) -> str:
    return str(error).split("\n", maxsplit=1)[0]
