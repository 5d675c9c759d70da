"""Checks between nodes: they meet as workers do, and try what training uses."""

import os
import socket
from collections.abc import Iterator
from datetime import timedelta

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
from cpr.versions import installed_text


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
    except (RendezvousError, OSError) as error:
        advice = (
            f"run `cpr doctor` on all {env.world_size} nodes at the same time, each with its own "
            f"--node-rank and the same --nodes, number 0 on {env.address}; open port {env.port} in its "
            "firewall, and end another program that has it"
        )
        yield problem("rendezvous", str(error), advice)
        return
    yield Finding("rendezvous", f"{env.world_size} nodes at {env.address}:{env.port}; this is {own.name}")
    meeting = Meeting(group.store, group.rank, tuple(info.host for info in group.infos))
    try:
        yield from check_equality(meeting, installed_text(), torch.cuda.device_count())
        if any(meeting.gather("--checkpoint", uri)):
            yield check_shared_directory(meeting, uri)
        found = list(check_interfaces(meeting))
        yield from found
        if all(each.state == "ok" for each in found):
            yield from _with_gloo(group, meeting, timeout)
        meeting.leave()
    except RendezvousError as error:
        yield problem("nodes", str(error), "see what its own `cpr doctor` says, and run all of them again")


def check_equality(meeting: Meeting, packages: str, num_gpus: int) -> Iterator[Finding]:
    """Check that all nodes have the same packages and as many GPUs; raises as `Meeting.gather`."""
    nodes = meeting.gather("list of packages", [packages, num_gpus])
    others = [(meeting.name(rank), *nodes[rank]) for rank in meeting.others]
    if different := [f"{node} has {theirs}" for node, theirs, _ in others if theirs != packages]:
        text = f"this node has {packages}; {'; '.join(different)}"
        yield problem("same versions", text, "install the same versions on all nodes")
    if different := [f"{node} {count}" for node, _, count in others if count != num_gpus]:
        text = f"this node has {num_gpus} GPUs, {', '.join(different)}"
        yield warning("same GPUs", text, "look at the driver and CUDA_VISIBLE_DEVICES where there are fewer")
    if all(node == nodes[0] for node in nodes):
        yield Finding("same versions", f"all nodes have the same packages and {num_gpus} GPUs")


def _with_gloo(group: WorkerGroup, meeting: Meeting, timeout: timedelta) -> Iterator[Finding]:
    """Check links and NCCL in a process group."""
    try:
        init_process_group(group, "gloo", timeout)
        yield from check_links(meeting)
        yield from _try_nccl(timeout)
    except RuntimeError as error:
        advice = (
            "see whether another node has ended; give slow links more time with --wait; open all ports "
            "between the nodes"
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


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n", maxsplit=1)[0]
