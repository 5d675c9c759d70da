"""The meeting itself: every worker of a generation gets its rank, a fresh store and the offers of all.

Under torchrun all generations of workers share the agent's store, and a process group made there meets the
addresses of the dead. So rank 0, the host, opens a listener on a free port and posts on the agent's store
only where that is (`board`). The others come, wait with their connections open (`guest`), and once all are
there the host decides (`offers`) and tells everybody, together with the port of a store that is new.
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
from cpr.rendezvous.client import Guest, Verdict, ranks_text
from cpr.rendezvous.discovery import Board
from cpr.rendezvous.launcher_env import Place
from cpr.rendezvous.leader import Host
from cpr.rendezvous.rank_assignment import Decision, Offer, decide
from cpr.rendezvous.stores import connect, serve


@dataclass(frozen=True, kw_only=True)
class Meeting:
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
    offers: tuple[Offer, ...]
    """Of all workers, by new rank."""
    kept: object = field(default=None, repr=False)
    """What must live as long as the store."""

    @property
    def launches(self) -> frozenset[str]:
        """Who launched the workers, as far as it is known: one name for each node, or one for all."""
        return frozenset(offer.launch for offer in self.offers if offer.launch)


def meet(offer: Offer, timeout: timedelta) -> Meeting:
    """Meet the other workers that the launcher started; alone, at once, if there was no launcher.

    Sets the environment variables RANK and GROUP_RANK to the new ones: all that reads them agrees with the
    process group.

    Args:
        offer: what this worker brings.
        timeout: how long to wait for the others, who may start later.

    Raises:
        RendezvousError: not all came in time; says who is missing.
        ValueError: the launcher's environment is not whole.
    """
    place = Place.from_environment()
    if place is None:
        return _meeting(HashStore(), 0, decide([offer]), [offer])
    meeting = meet_at(place, offer, timeout)
    os.environ["RANK"] = str(meeting.rank)
    if "GROUP_RANK" in os.environ and meeting.rank != place.rank:  # then all nodes are of one size
        os.environ["GROUP_RANK"] = str(meeting.rank // place.local_world_size)
    return meeting


def meet_at(place: Place, offer: Offer, timeout: timedelta) -> Meeting:
    """`meet` at a place that is told."""
    offer = replace(offer, local_rank=place.local_rank, local_world_size=place.local_world_size)
    if place.world_size == 1:
        return _meeting(HashStore(), 0, decide([offer]), [offer])
    attend = _host if place.rank == 0 else _attend
    return attend(place, offer, timeout)


def init_process_group(meeting: Meeting, backend: str | None, timeout: timedelta) -> None:
    """Make the default process group of those who met.

    Args:
        meeting: of all its workers.
        backend: "gloo", "nccl", or None: torch chooses by device.
        timeout: for the collectives of the group, and for making it.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("cpr/default", meeting.store),
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=timeout,
    )


def _host(place: Place, offer: Offer, timeout: timedelta) -> Meeting:
    deadline = time.monotonic() + timeout.total_seconds()
    with Host(place, offer) as host:
        store = serve(host.own, timeout)
        board = Board(place, host.announcement)
        try:
            offers = host.gather(deadline)
        finally:
            board.close()
        if offers is None:
            problem = f" ({board.problem})" if board.problem else ""
            raise RendezvousError(
                f"{ranks_text(host.missing)} of {place.world_size} did not come to the meeting within "
                f"{timeout.total_seconds():g} s{problem}"
            )
        decision = decide(offers)
        host.tell(decision, offers, store.port)
    # Where no agent keeps the board, rank 0 does; others may look at it once more before they hear.
    return _meeting(store, place.rank, decision, offers, kept=board.store)


def _attend(place: Place, offer: Offer, timeout: timedelta) -> Meeting:
    deadline = time.monotonic() + timeout.total_seconds()
    board = Board(place)
    guest = Guest(place, offer, board)
    try:
        while True:
            verdict = guest.attend(deadline, timeout)
            store = _store_of(verdict, timeout)
            if store:
                return _meeting(store, place.rank, verdict.decision, verdict.offers)
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
    store: Store, place: int, decision: Decision, offers: Sequence[Offer], kept: object = None
) -> Meeting:
    of_rank = {rank: offers[each] for each, rank in enumerate(decision.ranks)}
    return Meeting(
        store=store,
        rank=decision.ranks[place],
        world_size=len(offers),
        session_id=decision.session_id,
        generation=decision.generation,
        continues=decision.continues,
        offers=tuple(of_rank[rank] for rank in sorted(of_rank)),
        kept=kept,
    )
