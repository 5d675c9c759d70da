"""The rendezvous: every worker of a generation gets its rank, a fresh store, and the infos of all workers.

Under torchrun all generations of workers share the agent's store, and a process group made in it would
connect to the addresses of dead workers. So rank 0, the leader, listens on a free port and publishes only its
address in the agent's store (`discovery`). The others, the clients, connect and stay connected (`client`).
Once all are there, the leader assigns ranks and sends them to the clients, with the port of a new store
(`leader`).
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its __all__
    HashStore,
    PrefixStore,
    Store,
)

from cpr.errors import RendezvousError
from cpr.rendezvous.client import Client, ranks_text
from cpr.rendezvous.discovery import Discovery
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.leader import Leader
from cpr.rendezvous.rank_assignment import Assignment, WorkerInfo, assign_ranks
from cpr.rendezvous.stores import connect, serve


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Result of a rendezvous: all workers of a generation, and this worker's rank."""

    store: Store = field(repr=False)
    """A fresh store; it ends with the worker that was the launcher's rank 0."""
    rank: int
    """Assigned rank; may differ from the launcher's."""
    world_size: int
    session_id: str
    generation: int
    continues: bool
    """Whether any worker knows that it continues a run."""
    infos: tuple[WorkerInfo, ...]
    """Infos of all workers, by assigned rank."""
    kept: object = field(default=None, repr=False)
    """An object that must live as long as the store."""

    @property
    def launches(self) -> frozenset[str]:
        """The known launches of the workers: one for each node, or one for all."""
        return frozenset(info.launch for info in self.infos if info.launch)


def join(info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    """Join the other workers that the launcher started; without a launcher, a group of one.

    Sets the environment variables RANK and GROUP_RANK to the assigned ones, so that all readers of the
    environment agree with the process group.

    Args:
        info: of this worker.
        timeout: longest wait for the others, which may start later.

    Raises:
        RendezvousError: not all workers came in time; the message names the missing ranks.
        ValueError: the launcher's environment is incomplete.
    """
    env = LauncherEnv.from_environment()
    if env is None:
        return _group(HashStore(), 0, assign_ranks([info]), [info])
    worker_group = join_from(env, info, timeout)
    os.environ["RANK"] = str(worker_group.rank)
    if "GROUP_RANK" in os.environ and worker_group.rank != env.rank:  # then all nodes have the same size
        os.environ["GROUP_RANK"] = str(worker_group.rank // env.local_world_size)
    return worker_group


def join_from(env: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    """`join` with a given launcher environment; leaves `os.environ` unchanged."""
    info = replace(info, local_rank=env.local_rank, local_world_size=env.local_world_size)
    if env.world_size == 1:
        return _group(HashStore(), 0, assign_ranks([info]), [info])
    return (_lead if env.rank == 0 else _follow)(env, info, timeout)


def init_process_group(worker_group: WorkerGroup, backend: str | None, timeout: timedelta) -> None:
    """Make the default process group of a worker group.

    Args:
        worker_group: result of `join`.
        backend: "gloo", "nccl", or None: torch chooses by device.
        timeout: of the group's collectives, and of its creation.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("cpr/default", worker_group.store),
        rank=worker_group.rank,
        world_size=worker_group.world_size,
        timeout=timeout,
    )


def _lead(env: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    deadline = time.monotonic() + timeout.total_seconds()
    with Leader(env, info) as leader:
        store = serve(leader.own, timeout)
        discovery = Discovery(env, leader.address)
        try:
            infos = leader.gather(deadline)
        finally:
            discovery.close()
        if infos is None:
            problem = f" ({discovery.problem})" if discovery.problem else ""
            raise RendezvousError(
                f"{ranks_text(leader.missing)} of {env.world_size} did not join the rendezvous within "
                f"{timeout.total_seconds():g} s{problem}"
            )
        assignment = assign_ranks(infos)
        leader.send_assignment(assignment, infos, store.port)
    # where rank 0 hosts the launcher's store, clients may still poll it before they receive the assignment
    return _group(store, env.rank, assignment, infos, kept=discovery.store)


def _follow(env: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    deadline = time.monotonic() + timeout.total_seconds()
    discovery = Discovery(env)
    client = Client(env, info, discovery)
    try:
        while True:
            reply = client.wait_for_reply(deadline, timeout)
            try:
                store = connect(reply.address, reply.store_port, timeout, probe=True)
            except (OSError, RuntimeError):  # the leader died right after its reply: wait for the next one
                client.leave()
            else:
                return _group(store, env.rank, reply.assignment, reply.infos)
    finally:
        client.leave()
        discovery.close()


def _group(
    store: Store,
    launcher_rank: int,
    assignment: Assignment,
    infos: Sequence[WorkerInfo],
    kept: object = None,
) -> WorkerGroup:
    info_of_rank = dict(zip(assignment.ranks, infos, strict=True))
    return WorkerGroup(
        store=store,
        rank=assignment.ranks[launcher_rank],
        world_size=len(infos),
        session_id=assignment.session_id,
        generation=assignment.generation,
        continues=assignment.continues,
        infos=tuple(info_of_rank[rank] for rank in sorted(info_of_rank)),
        kept=kept,
    )
