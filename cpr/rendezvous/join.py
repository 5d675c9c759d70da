"""The meeting itself: every worker of a generation gets its rank, a fresh store and the offers of all.

Under torchrun all generations of workers share the agent's store, and a process group made there meets the
addresses of the dead. So rank 0, the host, opens a listener on a free port and posts on the agent's store
only where that is (`board`). The others come, wait with their connections open (`guest`), and once all are
there the host decides (`infos`) and tells everybody, together with the port of a store that is new.
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
    TCPStore,
)

from cpr.errors import RendezvousError
from cpr.rendezvous.client import Client, Verdict, ranks_text
from cpr.rendezvous.discovery import Discovery
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.leader import Leader
from cpr.rendezvous.rank_assignment import Assignment, WorkerInfo, assign_ranks
from cpr.rendezvous.stores import connect, serve


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """What all workers of a generation agreed on, and this one's part in it."""

    store: Store = field(repr=False)
    """Used by nobody before; it ends with the worker that was the launcher's rank 0."""
    rank: int
    """New; not always the launcher's."""
    world_size: int
    session_id: str
    generation: int
    continues: bool
    """Whether some worker knows that this continues a run."""
    infos: tuple[WorkerInfo, ...]
    """Of all workers, by new rank."""
    kept: object = field(default=None, repr=False)
    """What must live as long as the store."""

    @property
    def launches(self) -> frozenset[str]:
        """Who launched the workers, as far as it is known: one name for each node, or one for all."""
        return frozenset(info.launch for info in self.infos if info.launch)


def join(info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    """Meet the other workers that the launcher started; alone, at once, if there was no launcher.

    Sets the environment variables RANK and GROUP_RANK to the new ones: all that reads them agrees with the
    process group.

    Args:
        info: what this worker brings.
        timeout: how long to wait for the others, who may start later.

    Raises:
        RendezvousError: not all came in time; says who is missing.
        ValueError: the launcher's environment is not whole.
    """
    place = LauncherEnv.from_environment()
    if place is None:
        return _meeting(HashStore(), 0, assign_ranks([info]), [info])
    worker_group = join_at(place, info, timeout)
    os.environ["RANK"] = str(worker_group.rank)
    if "GROUP_RANK" in os.environ and worker_group.rank != place.rank:  # then all nodes are of one size
        os.environ["GROUP_RANK"] = str(worker_group.rank // place.local_world_size)
    return worker_group


def join_at(place: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    """`join` at a place that is told."""
    info = replace(info, local_rank=place.local_rank, local_world_size=place.local_world_size)
    if place.world_size == 1:
        return _meeting(HashStore(), 0, assign_ranks([info]), [info])
    attend = _host if place.rank == 0 else _attend
    return attend(place, info, timeout)


def init_process_group(worker_group: WorkerGroup, backend: str | None, timeout: timedelta) -> None:
    """Make the default process group of those who met.

    Args:
        worker_group: of all its workers.
        backend: "gloo", "nccl", or None: torch chooses by device.
        timeout: for the collectives of the group, and for making it.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("cpr/default", worker_group.store),
        rank=worker_group.rank,
        world_size=worker_group.world_size,
        timeout=timeout,
    )


def _host(place: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    deadline = time.monotonic() + timeout.total_seconds()
    with Leader(place, info) as host:
        store = serve(host.own, timeout)
        board = Discovery(place, host.announcement)
        try:
            infos = host.gather(deadline)
        finally:
            board.close()
        if infos is None:
            problem = f" ({board.problem})" if board.problem else ""
            raise RendezvousError(
                f"{ranks_text(host.missing)} of {place.world_size} did not come to the meeting within "
                f"{timeout.total_seconds():g} s{problem}"
            )
        decision = assign_ranks(infos)
        host.tell(decision, infos, store.port)
    # Where no agent keeps the board, rank 0 does; others may look at it once more before they hear.
    return _meeting(store, place.rank, decision, infos, kept=board.store)


def _attend(place: LauncherEnv, info: WorkerInfo, timeout: timedelta) -> WorkerGroup:
    deadline = time.monotonic() + timeout.total_seconds()
    board = Discovery(place)
    guest = Client(place, info, board)
    try:
        while True:
            verdict = guest.attend(deadline, timeout)
            store = _store_of(verdict, timeout)
            if store:
                return _meeting(store, place.rank, verdict.decision, verdict.infos)
            guest.leave()  # the host died right after its decision
    finally:
        guest.leave()
        board.close()


def _store_of(verdict: Verdict, timeout: timedelta) -> TCPStore | None:
    try:
        return connect(verdict.address, verdict.store_port, timeout, doubtful=True)
    except (OSError, RuntimeError):
        return None


def _meeting(
    store: Store, place: int, decision: Assignment, infos: Sequence[WorkerInfo], kept: object = None
) -> WorkerGroup:
    of_rank = {rank: infos[each] for each, rank in enumerate(decision.ranks)}
    return WorkerGroup(
        store=store,
        rank=decision.ranks[place],
        world_size=len(infos),
        session_id=decision.session_id,
        generation=decision.generation,
        continues=decision.continues,
        infos=tuple(of_rank[rank] for rank in sorted(of_rank)),
        kept=kept,
    )
