"""A guest of a meeting: every worker but the host.

It goes to whoever is announced, brings its offer and waits for the decision; when the connection ends, or
somebody newer is announced who answers, it goes there instead.
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
class Verdict:
    """What the host told."""

    decision: Assignment
    infos: tuple[WorkerInfo, ...]
    """In the order of the launcher's ranks."""
    address: str
    store_port: int


class Client:
    """Looks for a host and waits with it; call `leave` in the end."""

    def __init__(self, place: LauncherEnv, info: WorkerInfo, board: Discovery) -> None:
        self._place, self._offer, self._board = place, info, board
        self._host: LeaderAddress | None = None
        self._connection: Connection | None = None
        self._missing: list[int] | None = None
        """As the host told last."""

    def attend(self, deadline: float, timeout: timedelta) -> Verdict:
        """Wait for a decision until `deadline`, as `time.monotonic` has it; `timeout` is for the message.

        Raises:
            RendezvousError: it did not come, or another process took this rank.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            self._go_where_announced(left_s)
            for message in self._listen(min(POLL_S, left_s)):
                verdict = self._understand(message)
                if verdict:
                    return verdict
        raise RendezvousError(
            f"no meeting of {self._place.world_size} workers within {timeout.total_seconds():g} s: "
            f"{self._why()}"
        )

    def leave(self) -> None:
        """Hang up."""
        if self._connection:
            self._connection.close()
        self._connection = self._host = self._missing = None

    def _go_where_announced(self, left_s: float) -> None:
        news = self._board.latest
        if news is None or (news == self._host and self._connection):
            return
        connection = Connection.to(news.address, news.port, news.nonce, min(CONNECT_TIMEOUT_S, left_s))
        if connection is None:
            return  # long dead, most likely; whom we wait with now may still decide
        try:
            connection.send(
                {
                    "rank": self._place.rank,
                    "world_size": self._place.world_size,
                    "offer": self._offer.to_json(),
                }
            )
        except LostError:
            connection.close()
            return
        self.leave()
        self._host, self._connection = news, connection

    def _listen(self, timeout_s: float) -> list[dict[str, Any]]:
        if self._connection is None:
            time.sleep(timeout_s)
            return []
        try:
            return self._connection.read() if self._connection.wait(timeout_s) else []
        except LostError:
            self.leave()
            time.sleep(timeout_s)  # who hangs up at once may go on to do so
            return []

    def _understand(self, message: dict[str, Any]) -> Verdict | None:
        if "displaced" in message:
            raise RendezvousError(
                f"another process came as rank {self._place.rank}: "
                "this one belongs to an agent that was replaced"
            )
        if "missing" in message:
            self._missing = message["missing"]
        if "decision" not in message or self._host is None:
            return None
        decision = message["decision"]
        return Verdict(
            decision=Assignment(**{**decision, "ranks": tuple(decision["ranks"])}),
            infos=tuple(map(WorkerInfo.from_json, message["offers"])),
            address=self._host.address,
            store_port=message["store_port"],
        )

    def _why(self) -> str:
        board = f"the launcher's store at {self._place.address}:{self._place.port}"
        if self._connection and self._missing:
            return f"{ranks_text(self._missing)} did not come"
        if self._connection and self._host:
            return f"rank 0 at {self._host.address}:{self._host.port} does not answer"
        if self._board.problem:
            return (
                f"{board} cannot be reached ({self._board.problem}). When an agent is replaced, torchrun may "
                "send workers to the store of the old one: start every agent by `cpr run -- torchrun ...`"
            )
        if self._board.latest:
            return f"rank 0 did not come; {asdict(self._board.latest)} in {board} is of an earlier one"
        return f"rank 0 did not come; it has left no word in {board}"


def ranks_text(ranks: list[int]) -> str:
    """For messages."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
