"""The mirror of a worker in its own node's shared memory, for tables that would end with their process."""

from torch import Tensor

from cpr.mirror.copy import MirrorCopy, Moment, Owner
from cpr.resident.home import Home


class HostKeeper:
    """Keeper and link in one, without a network: the owner's thread itself writes into the mirror.

    Args:
        home: folder of the run's memory on this machine.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._copy: MirrorCopy | None = None

    def __str__(self) -> str:
        return "shared memory"

    def link(self) -> "HostKeeper":
        """The link is the keeper itself."""
        return self

    def introduce(self, owner: Owner) -> None:
        """Make memory for the owner, unless that was done.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        if self._copy is None:
            self._copy = MirrorCopy(self._home, owner)

    def empty(self) -> None:
        """Free the mirror, and make memory for it again.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        assert self._copy is not None
        before, self._copy = self._copy, None
        before.remove()
        self.introduce(before.owner)

    def send_rows(self, data: Tensor) -> None:
        """Write rows before the first moment, uint8 `[n]` on the CPU.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        assert self._copy is not None
        received = self._copy.receive(data.numel())
        self._copy.put_rows(received.copy_(data))

    def send_moment(self, moment: Moment, data: Tensor) -> None:
        """Write a moment; it counts when this returns.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        assert self._copy is not None
        self._copy.receive(data.numel()).copy_(data)
        self._copy.put(moment)

    def close(self, *, remove: bool = False) -> None:
        """End the link, or the keeper; `remove`: free the mirror, instead of leaving it to a successor."""
        if remove and self._copy is not None:
            self._copy.remove()
