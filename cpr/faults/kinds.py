"""What can be made to go wrong: one small frozen dataclass for each kind of failure.

A kind says what happens and can be written as JSON; the drivers (`injector`, `killer`) make it happen.
"""

import errno
import math
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

Damage = Literal["any", "flip", "truncate", "remove"]
Outage = Literal["fail", "hang"]
KILL: Final = "KILL"


class InjectedError(RuntimeError):
    """The failure that `Raise` asks for."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Base of all kinds."""

    name: ClassVar[str]
    """In JSON and CSV."""
    inside: ClassVar[bool] = False
    """Whether an `Injector` in the worker can do it."""
    outside: ClassVar[bool] = False
    """Whether a `Killer` beside the run can do it."""
    of_node: ClassVar[bool] = False
    """Whether its target is a node, counted from 0, and not a rank."""
    of_run: ClassVar[bool] = False
    """Whether it strikes all ranks alike: a target is not heeded."""

    def told(self, whom: str) -> str:
        """For the log, as in "kill -9 of rank 1".

        Args:
            whom: "rank 1" or "node 0".
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Raise(Kind):
    """An exception (`InjectedError`) in a step of a worker."""

    name = "raise"
    inside = True
    message: str = "injected failure"

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"an exception in {whom}"


@dataclass(frozen=True, kw_only=True)
class KillWorker(Kind):
    """`kill -9` of one worker's process."""

    name = "kill_worker"
    inside = outside = True
    wipe: bool = False
    """Whether the worker's resident memory is removed, too, so that its shards are lost."""

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"kill -9 of {whom}" + (" with its resident memory" if self.wipe else "")


@dataclass(frozen=True, kw_only=True)
class KillAgent(Kind):
    """`kill -9` of a node's torchrun process; its resident memory stays."""

    name = "kill_agent"
    outside = of_node = True
    workers: bool = True
    """Whether its workers are killed with it, or left behind as orphans."""

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"kill -9 of the agent of {whom}" + (" and its workers" if self.workers else "")


@dataclass(frozen=True, kw_only=True)
class LoseNode(Kind):
    """Everything of a node goes: agent, workers and resident memory."""

    name = "lose_node"
    outside = of_node = True

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"loss of {whom}: kill -9 of its agent and workers, resident memory wiped"


@dataclass(frozen=True, kw_only=True)
class PauseNode(Kind):
    """All processes of a node stand still (SIGSTOP), and later go on as if nothing had happened."""

    name = "pause_node"
    outside = of_node = True
    duration_s: float = 60.0
    """Longer than the timeout of collectives, the others go on without the node, and it returns to them."""

    def __post_init__(self) -> None:
        _check_positive("duration_s", self.duration_s)

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"a pause of {self.duration_s:g} s of all processes of {whom}"


@dataclass(frozen=True, kw_only=True)
class Partition(Kind):
    """A node is cut off from the network and later connected again; its processes run all the while."""

    name = "partition"
    outside = of_node = True
    duration_s: float = 30.0
    """Until the link is healed."""

    def __post_init__(self) -> None:
        _check_positive("duration_s", self.duration_s)

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"a partition of {self.duration_s:g} s between {whom} and all others"


@dataclass(frozen=True, kw_only=True)
class Hang(Kind):
    """A worker stands still for a while: from outside by SIGSTOP, inside by sleeping in its step."""

    name = "hang"
    inside = outside = True
    duration_s: float = 600.0
    """After which it goes on, if it is still there."""

    def __post_init__(self) -> None:
        _check_positive("duration_s", self.duration_s)

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"a hang of {self.duration_s:g} s of {whom}"


@dataclass(frozen=True, kw_only=True)
class Slow(Kind):
    """A worker takes longer for its steps, until `num_steps` are over or it is restarted."""

    name = "slow"
    inside = True
    num_steps: int
    factor: float = 1.0
    """How many times as long as usual a step takes."""
    extra_s: float = 0.0
    """Seconds that are added to every step."""

    def __post_init__(self) -> None:
        _check_positive("num_steps", self.num_steps)
        if not (1 <= self.factor < math.inf and 0 <= self.extra_s < math.inf):
            raise ValueError(
                f"factor is {self.factor} and extra_s is {self.extra_s}; "
                "a slow worker takes at least 1 times as long, and extra_s is not negative"
            )
        if self.factor == 1 and self.extra_s == 0:
            raise ValueError("nothing makes this worker slow: give a factor above 1, or extra_s")

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        return f"{whom} slow ({self.factor:g} x and {self.extra_s:g} s a step) for {self.num_steps} steps"


@dataclass(frozen=True, kw_only=True)
class DamageFile(Kind):
    """One file of the newest save in the checkpoint directory is damaged; the seed says which, and where."""

    name = "damage_file"
    inside = outside = True
    how: Damage = "any"
    """A bit flipped, cut short, removed, or any of these."""

    def __post_init__(self) -> None:
        if self.how not in get_args(Damage):
            raise ValueError(f"how is {self.how!r}; choose one of {', '.join(get_args(Damage))}")

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        how = {"any": "damaged", "flip": "damaged by a flipped bit", "truncate": "cut short"}
        return f"a file of the newest save {how.get(self.how, 'removed')}"


@dataclass(frozen=True, kw_only=True)
class StorageError(Kind):
    """The checkpoint storage of a worker fails at an operation."""

    name = "storage_error"
    inside = True
    operation: str = "write"
    """One of `OPERATIONS`."""
    path: str = ""
    """Only operations on files with this in their path count."""
    at: int = 1
    """The how manieth such operation from now on."""
    error: str = "ENOSPC"
    """Name of the error (`errno`), or `KILL`: the process is killed with -9 at that point."""
    lasting: bool = False
    """Whether all later ones fail, too, as on a full disk."""

    def __post_init__(self) -> None:
        _check_operation(self.operation)
        _check_positive("at", self.at)
        if self.error != KILL and not hasattr(errno, self.error):
            raise ValueError(f"error is {self.error!r}; give a name of errno such as ENOSPC, or {KILL}")

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        where = f" of {self.path!r}" if self.path else ""
        later = " and those after it" if self.lasting else ""
        return f"{self.error} at {self.operation} number {self.at}{where}{later}, in the storage of {whom}"


@dataclass(frozen=True, kw_only=True)
class StorageDelay(Kind):
    """The checkpoint storage of a worker is slow at an operation, or from it on."""

    name = "storage_delay"
    inside = True
    delay_s: float
    operation: str = "write"
    """One of `OPERATIONS`."""
    path: str = ""
    """Only operations on files with this in their path count."""
    at: int = 1
    """The how manieth such operation from now on."""
    lasting: bool = False
    """Whether all later ones are slow, too."""

    def __post_init__(self) -> None:
        _check_operation(self.operation)
        _check_positive("at", self.at)
        _check_positive("delay_s", self.delay_s)

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        where = f" of {self.path!r}" if self.path else ""
        later = " and those after it" if self.lasting else ""
        return (
            f"{self.delay_s:g} s of delay at {self.operation} number {self.at}{where}{later}, "
            f"in the storage of {whom}"
        )


@dataclass(frozen=True, kw_only=True)
class StorageOutage(Kind):
    """The checkpoint storage of all workers is out, also of workers that are started before it is back.

    The clock of all machines must be about the same.
    """

    name = "storage_outage"
    inside = of_run = True
    duration_s: float = 60.0
    """From the moment at which the first rank reaches it."""
    how: Outage = "fail"
    """Operations fail, or they stand still until it is over."""
    reads: bool = True
    """Whether reading is affected, too, or only what changes the storage."""
    error: str = "EIO"
    """Name of the error (`errno`) if operations fail."""

    def __post_init__(self) -> None:
        _check_positive("duration_s", self.duration_s)
        if self.how not in get_args(Outage):
            raise ValueError(f"how is {self.how!r}; choose one of {', '.join(get_args(Outage))}")
        if not hasattr(errno, self.error):
            raise ValueError(f"error is {self.error!r}; give a name of errno such as EIO")

    def told(self, whom: str) -> str:
        """See `Kind.told`."""
        how = f"fail with {self.error}" if self.how == "fail" else "stand still"
        what = "all operations" if self.reads else "all writes and deletions"
        return f"an outage of {self.duration_s:g} s, in which {what} {how}, of the storage of {whom}"


OPERATIONS: Final = ("create", "write", "commit", "committed", "read", "size", "list", "delete")
"""Of a storage. `commit` is between a file's last byte and its appearance, `committed` right after that."""
READING: Final = frozenset({"read", "size", "list"})
"""Operations that change nothing."""

KINDS: Final[dict[str, type[Kind]]] = {
    kind.name: kind
    for kind in (
        Raise,
        KillWorker,
        KillAgent,
        LoseNode,
        PauseNode,
        Partition,
        Hang,
        Slow,
        DamageFile,
        StorageError,
        StorageDelay,
        StorageOutage,
    )
}


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a positive number")


def _check_operation(operation: str) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}; choose one of {', '.join(OPERATIONS)}")
