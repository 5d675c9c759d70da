"""Client side of a rendezvous: every worker but the leader.

A client connects to the published leader, sends its info, and waits for the assignment of ranks. When the
connection ends, or a newer leader is published and answers, the client moves there.
"""

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from cpr.errors import RendezvousError
from cpr.rendezvous.discovery import POLL_S, Discovery, LeaderAddress
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.messages import Connection, LostError
from cpr.rendezvous.rank_assignment import Assignment, WorkerInfo
from cpr.rendezvous.stores import CONNECT_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class LeaderReply:
    """The leader's last message: the assignment of ranks and the new store."""

    assignment: Assignment
    infos: tuple[WorkerInfo, ...]
    """In the order of the launcher's ranks."""
    address: str
    store_port: int


class Client:
    """Finds a leader and waits for its reply; call `leave` at the end."""

    def __init__(self, env: LauncherEnv, info: WorkerInfo, discovery: Discovery) -> None:
        self._env, self._info, self._discovery = env, info, discovery
        self._leader: LeaderAddress | None = None
        self._connection: Connection | None = None
        self._missing: list[int] | None = None
        """Missing ranks, as last reported by the leader."""

    def wait_for_reply(self, deadline: float, timeout: timedelta) -> LeaderReply:
        """Wait for the leader's reply until `deadline` (`time.monotonic`); `timeout` is for the message.

        Raises:
            RendezvousError: no reply came, or another process took this rank.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            self._follow_leader(left_s)
            for message in self._receive(min(POLL_S, left_s)):
                reply = self._handle(message)
                if reply:
                    return reply
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
                {"rank": self._env.rank, "world_size": self._env.world_size, "info": self._info.to_json()}
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

    def _handle(self, message: dict[str, Any]) -> LeaderReply | None:
        if "displaced" in message:
            raise RendezvousError(
                f"another process came as rank {self._env.rank}: "
                "this one belongs to an agent that was replaced"
            )
        if "missing" in message:
            self._missing = message["missing"]
        if "assignment" not in message or self._leader is None:
            return None
        assignment = message["assignment"]
        return LeaderReply(
            assignment=Assignment(**{**assignment, "ranks": tuple(assignment["ranks"])}),
            infos=tuple(map(WorkerInfo.from_json, message["infos"])),
            address=self._leader.address,
            store_port=message["store_port"],
        )

    def _cause(self) -> str:
        store = f"the launcher's store at {self._env.address}:{self._env.port}"
        if self._connection and self._missing:
            return f"{ranks_text(self._missing)} did not come"
        if self._connection and self._leader:
            return f"rank 0 at {self._leader.address}:{self._leader.port} does not answer"
        if self._discovery.problem:
            return (
                f"{store} cannot be reached ({self._discovery.problem}). When an agent is replaced, torchrun "
                "may send workers to the store of the old one: start every agent by `cpr run -- torchrun ...`"
            )
        if self._discovery.latest:
            return f"rank 0 did not come; {asdict(self._discovery.latest)} in {store} is of an earlier one"
        return f"rank 0 did not come; it has published no address in {store}"


def ranks_text(ranks: list[int]) -> str:
    """Ranks for a message: "rank 1", "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
