"""Exchange of findings through the rendezvous' store, so that nodes learn of each other's failures."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its __all__
    DistStoreError,
    Store,
)

from cpr.errors import RendezvousError

_LEAVING: Final = "goodbye"


@dataclass(frozen=True)
class Meeting:
    """All nodes, and the store that the first of them hosts."""

    store: Store = field(repr=False)
    """Its timeout limits each wait for another node."""
    rank: int
    """Of this node."""
    hosts: tuple[str, ...]
    """Host names of all nodes."""

    @property
    def others(self) -> list[int]:
        """Ranks of the other nodes."""
        return [rank for rank in range(len(self.hosts)) if rank != self.rank]

    def name(self, rank: int) -> str:
        """A node's name, for messages."""
        return f"node {rank} ({self.hosts[rank]})"

    def gather(self, what: str, own: object) -> list[Any]:
        """Give all nodes a value, and wait for theirs.

        Args:
            what: name of the value; each takes a new one.
            own: of this node, as JSON can hold it.

        Returns:
            The values of all nodes, by rank.

        Raises:
            RendezvousError: names a node that has ended, or has not answered in time.
        """
        rank = 0
        try:
            self.store.set(f"doctor/{what}/{self.rank}", json.dumps(own))
            found = []
            for rank in range(len(self.hosts)):
                found.append(json.loads(self.store.get(f"doctor/{what}/{rank}")))
            return found
        except RuntimeError as error:
            # without an answer from the store itself, the node that hosts it is gone
            lost = rank if isinstance(error, DistStoreError) else 0
            raise RendezvousError(
                f"{self.name(lost)} has ended, or does not answer: no {what} from it"
            ) from error

    def leave(self) -> None:
        """Leave; the node that hosts the store waits for all others. Raises as `gather`."""
        if self.rank == 0:
            self.gather(_LEAVING, None)
            return
        with suppress(RuntimeError):  # the host has ended already
            self.store.set(f"doctor/{_LEAVING}/{self.rank}", json.dumps(None))
