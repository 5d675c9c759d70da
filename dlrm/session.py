"""The seam for fault tolerance: what the training loop asks of it, and the loop without any."""

from typing import Protocol


class Session(Protocol):
    """What a training loop holds to survive failures: the verbs of `cpr.PartialRecovery`."""

    def restore(self) -> None:
        """Bring model and position back to where training goes on; called once, before the first step."""

    def step(self) -> None:
        """A step is complete on this rank: rows, dense parameters and data position belong together."""

    def close(self) -> None:
        """Training ends, in whatever way."""


class NoRecovery:
    """Training without fault tolerance: a worker's death ends the run."""

    def restore(self) -> None:
        """Nothing: training begins at the beginning."""

    def step(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
