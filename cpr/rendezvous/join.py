"""The rendezvous: every worker of a generation gets its rank, a fresh store, and the infos of all workers.

Under torchrun all generations of workers share the agent's store, and a process group made in it would
connect to the addresses of dead workers. So rank 0, the leader, listens on a free port and publishes only its
address in the agent's store (`discovery`). The others, the clients, connect and stay connected. Once all are
there, the leader assigns ranks and sends them to the clients, with the port of a new store (`leader`).
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its __all__
    HashStore,
    PrefixStore,
    Store,
)

from cpr.errors import RendezvousError
from cpr.rendezvous.discovery import (
    CONNECT_TIMEOUT_S,
    POLL_S,
    Discovery,
    LeaderAddress,
    connect,
    serve,
)
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.leader import Leader
from cpr.rendezvous.messages import Connection, LostError
from cpr.rendezvous.rank_assignment import Assignment, WorkerInfo, assign_ranks


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

    Raises:
        RendezvousError: not all workers came before the timeout; the message names the missing ranks.
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
    """Make the default process group of a worker group; backend None: torch chooses by device."""
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
                f"{_ranks_text(leader.absent)} of {env.world_size} did not join the rendezvous within "
                f"{timeout.total_seconds():g} s{problem}"
            )
        assignment = assign_ranks(infos)
        leader.send_assignment(assignment, infos, store.port)
    # where rank 0 hosts the launcher's store, clients may still poll it before they receive the assignment
    return _group(store, env.rank, assignment, infos, kept=discovery.store)


def _follow(env: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    deadline = time.monotonic() + timeout.total_seconds()
    discovery = Discovery(env)
    client = _Client(env, info, discovery)
    try:
        while True:
            address, message = client.wait_for_assignment(deadline, timeout)
            assignment, infos = message["assignment"], list(map(WorkerInfo.from_json, message["infos"]))
            try:
                store = connect(address, message["store_port"], timeout, probe=True)
            except (OSError, RuntimeError):  # the leader died right after its reply: wait for the next one
                client.leave()
            else:
                return _group(store, env.rank, Assignment(**assignment), infos)
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


class _Client:
    """Finds the published leader, sends it this worker's info, and waits for the assignment of ranks.

    When the connection ends, or a newer leader is published and answers, the client moves there.
    """

    def __init__(self, env: LauncherEnv, info: WorkerInfo, discovery: Discovery) -> None:
        self._env, self._info, self._discovery = env, info, discovery
        self._leader: LeaderAddress | None = None
        self._connection: Connection | None = None
        self._missing: list[int] | None = None
        """Missing ranks, as last reported by the leader."""

    def wait_for_assignment(self, deadline: float, timeout: timedelta) -> tuple[str, dict[str, Any]]:
        """Wait for the leader's last message until `deadline` (`time.monotonic`); `timeout` is for the error.

        Returns:
            The leader's address, and the message.

        Raises:
            RendezvousError: none came, or another process took this rank.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            self._follow_leader(left_s)
            for message in self._receive(min(POLL_S, left_s)):
                if self._is_last(message) and self._leader is not None:
                    return self._leader.address, message
        raise RendezvousError(
            f"no rendezvous of {self._env.world_size} workers within {timeout.total_seconds():g} s: "
            f"{self._cause()}"
        )

    def leave(self) -> None:
        """Close the connection."""
        if self._connection:
            self._connection.close()
        self._connection = self._leader = self._missing = None

    def _follow_leader(self, left_s: float) -> None:
        """Connect to the newest leader, unless connected to it already."""
        newest = self._discovery.latest
        if newest is None or (newest == self._leader and self._connection):
            return
        connection = Connection.to(newest.address, newest.port, newest.nonce, min(CONNECT_TIMEOUT_S, left_s))
        if connection is None:
            return  # most likely dead for long; the present leader may still reply
        try:
            connection.send(
                {"rank": self._env.rank, "world_size": self._env.world_size, "info": asdict(self._info)}
            )
        except LostError:
            connection.close()
            return
        self.leave()
        self._leader, self._connection = newest, connection

    def _receive(self, timeout_s: float) -> list[dict[str, Any]]:
        if self._connection is None:
            time.sleep(timeout_s)
            return []
        try:
            return self._connection.read() if self._connection.wait(timeout_s) else []
        except LostError:
            self.leave()
            time.sleep(timeout_s)  # a peer that hangs up at once may keep doing so
            return []

    def _is_last(self, message: dict[str, Any]) -> bool:
        if "displaced" in message:
            raise RendezvousError(
                f"another process came as rank {self._env.rank}: "
                "this one belongs to an agent that was replaced"
            )
        if "missing" in message:
            self._missing = message["missing"]
        return "assignment" in message

    def _cause(self) -> str:
        store = f"the launcher's store at {self._env.address}:{self._env.port}"
        if self._connection and self._missing:
            return f"{_ranks_text(self._missing)} did not come"
        if self._connection and self._leader:
            return f"rank 0 at {self._leader.address}:{self._leader.port} does not answer"
        if self._discovery.problem:
            advice = (
                ". When an agent is replaced, torchrun may send workers to the store of the old one: start "
                "every agent by `cpr run -- torchrun ...`"
            )
            return f"{store} cannot be reached ({self._discovery.problem}){advice * self._env.of_agent}"
        if latest := self._discovery.latest:
            earlier = ", or the address is of an earlier rank 0, and no new one came" * self._env.of_agent
            return (
                f"rank 0 cannot be reached at {latest.address}:{latest.port}, its address in {store}: a "
                f"firewall closes the port{earlier}"
            )
        return f"rank 0 did not come; it has published no address in {store}"


def _ranks_text(ranks: list[int]) -> str:
    """Ranks for a message: "rank 1", "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
