"""Kinds of failures: one small frozen dataclass for each.

A kind says what happens and can be written as JSON; the drivers (`injector`, `killer`) make it happen.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal

from cpr.fields import check_fields
from cpr.strict_json import build, register

Damage = Literal["any", "flip", "truncate", "remove"]
OutageMode = Literal["fail", "hang"]
KILL: Final = "KILL"
Operation = Literal["create", "write", "commit", "committed", "read", "size", "list", "delete"]
"""Of a storage. `commit` is between a file's last byte and its appearance, `committed` right after that."""
READING: Final = frozenset({"read", "size", "list"})
"""Operations that change nothing."""
_POSITIVE: Final = frozenset({"duration_s", "delay_s", "num_steps", "at"})
"""Fields of all kinds whose values must be positive."""


KINDS: Final[dict[str, type["Kind"]]] = {}
"""All kinds by name."""


class InjectedError(RuntimeError):
    """The exception of `Raise`."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Base of all kinds."""

    name: ClassVar[str]
    """In JSON and CSV."""
    text: ClassVar[str]
    """Description for the log, formatted with `target` ("rank 1", "node 0") and the fields of the kind."""
    inside: ClassVar[bool] = False
    """Whether an `Injector` in the worker can do it."""
    outside: ClassVar[bool] = False
    """Whether a `Killer` outside of the run can do it."""
    of_node: ClassVar[bool] = False
    """Whether its target is a node, counted from 0, instead of a rank."""
    other_errors: ClassVar[tuple[str, ...]] = ()
    """What the field `error` may be besides the names in `errno`."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            KINDS[cls.name] = cls

    def __post_init__(self) -> None:
        check_fields(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _POSITIVE and value <= 0:
                raise ValueError(f"{field.name} is {value}; it must be a positive number")
            if field.name == "error" and not hasattr(errno, value) and value not in self.other_errors:
                raise ValueError(f"error is {value!r}; give a name of errno such as EIO")

    def describe(self, target: str) -> str:
        """Text for the log, such as "kill -9 of rank 1" for the target "rank 1"."""
        return self.text.format(target=target, **vars(self))


@dataclass(frozen=True, kw_only=True)
class Raise(Kind):
    """An exception (`InjectedError`) in a step of a worker."""

    name = "raise"
    text = "an exception in {target}"
    inside = True
    message: str = "injected failure"


@dataclass(frozen=True, kw_only=True)
class Abort(Kind):
    """An abort (SIGABRT) of a worker, as by PyTorch's watchdog of NCCL after a failed collective."""

    name = "abort"
    text = "an abort of {target}"
    inside = True


@dataclass(frozen=True, kw_only=True)
class KillWorker(Kind):
    """`kill -9` of one worker's process."""

    name = "kill_worker"
    text = "kill -9 of {target}"
    inside = outside = True
    wipe: bool = False
    """Whether the worker's resident memory is removed, too, so that its shards are lost."""

    def describe(self, target: str) -> str:
        """See `Kind.describe`."""
        return super().describe(target) + (" with its resident memory" if self.wipe else "")


@dataclass(frozen=True, kw_only=True)
class KillAgent(Kind):
    """`kill -9` of a node's torchrun process; its resident memory stays."""

    name = "kill_agent"
    text = "kill -9 of the agent of {target}"
    outside = of_node = True
    workers: bool = True
    """Whether its workers are killed with it, or left behind as orphans."""

    def describe(self, target: str) -> str:
        """See `Kind.describe`."""
        return super().describe(target) + (" and its workers" if self.workers else "")


@dataclass(frozen=True, kw_only=True)
class LoseNode(Kind):
    """Loss of a node: its agent, workers and resident memory."""

    name = "lose_node"
    text = "loss of {target}: kill -9 of its agent and workers, resident memory wiped"
    outside = of_node = True


@dataclass(frozen=True, kw_only=True)
class PauseNode(Kind):
    """A pause of all processes of a node (SIGSTOP), which later continue as if nothing had happened."""

    name = "pause_node"
    text = "a pause of {duration_s:g} s of all processes of {target}"
    outside = of_node = True
    duration_s: float = 60.0
    """If longer than the timeout of collectives, the others continue without the node until it returns."""


@dataclass(frozen=True, kw_only=True)
class Partition(Kind):
    """A network partition between a node and all others; the processes keep running."""

    name = "partition"
    text = "a partition of {duration_s:g} s between {target} and all others"
    outside = of_node = True
    duration_s: float = 30.0
    """Until the link is healed."""


@dataclass(frozen=True, kw_only=True)
class Hang(Kind):
    """A hang of a worker: from outside by SIGSTOP, inside by sleeping in its step."""

    name = "hang"
    text = "a hang of {duration_s:g} s of {target}"
    inside = outside = True
    duration_s: float = 600.0
    """The worker continues afterwards, if it is still alive."""


@dataclass(frozen=True, kw_only=True)
class Slow(Kind):
    """Slower steps of a worker, for `num_steps` or until its restart."""

    name = "slow"
    text = "{target} slow ({factor:g} x and {extra_s:g} s a step) for {num_steps} steps"
    inside = True
    num_steps: int
    factor: float = 1.0
    """Duration of a step as a multiple of its usual one."""
    extra_s: float = 0.0
    """Seconds added to every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1 or self.extra_s < 0:
            raise ValueError(
                f"factor is {self.factor} and extra_s is {self.extra_s}; "
                "a slow worker takes at least 1 times as long, and extra_s is not negative"
            )
        if self.factor == 1 and self.extra_s == 0:
            raise ValueError("nothing makes this worker slow: give a factor above 1, or extra_s")


@dataclass(frozen=True, kw_only=True)
class DamageFile(Kind):
    """Damage to one file of the newest save in the checkpoint directory, chosen by the seed."""

    name = "damage_file"
    text = "a file of the newest save {how}"
    inside = outside = True
    how: Damage = "any"
    """A bit flipped, the file truncated, removed, or any of these."""

    def describe(self, target: str) -> str:
        """See `Kind.describe`."""
        how = {"any": "damaged", "flip": "damaged by a flipped bit", "truncate": "cut short"}
        return self.text.format(how=how.get(self.how, "removed"))


@dataclass(frozen=True, kw_only=True)
class _StorageFault(Kind):
    """Base of failures at an operation of a worker's checkpoint storage."""

    inside = True
    operation: Operation = "write"
    path: str = ""
    """Only operations on files whose path contains this text count."""
    at: int = 1
    """Number of the operation from now on, the next one is 1."""
    lasting: bool = False
    """Whether all later operations are affected, too, as on a full disk."""

    def describe(self, target: str) -> str:
        """See `Kind.describe`."""
        where = f" of {self.path!r}" if self.path else ""
        later = " and those after it" if self.lasting else ""
        fault = super().describe(target)
        return f"{fault} at {self.operation} number {self.at}{where}{later}, in the storage of {target}"


@dataclass(frozen=True, kw_only=True)
class StorageError(_StorageFault):
    """An error of a worker's checkpoint storage at an operation."""

    name = "storage_error"
    text = "{error}"
    other_errors = (KILL,)
    error: str = "ENOSPC"
    """Name of an error (`errno`), or `KILL`: the process is killed with -9 at that point."""


@dataclass(frozen=True, kw_only=True)
class StorageDelay(_StorageFault):
    """A delay of a worker's checkpoint storage at an operation."""

    name = "storage_delay"
    text = "{delay_s:g} s of delay"
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class StorageOutage(Kind):
    """An outage of the checkpoint storage of all workers, including those started before its end.

    The clocks of all machines must be about the same.
    """

    name = "storage_outage"
    text = "an outage of {duration_s:g} s"
    inside = True
    duration_s: float = 60.0
    """From the moment at which the first rank reaches it."""
    how: OutageMode = "fail"
    """Whether operations fail, or hang until the outage is over."""
    reads: bool = True
    """Whether reading is affected, too, or only what changes the storage."""
    error: str = "EIO"
    """Name of the error (`errno`) if operations fail."""

    def describe(self, target: str) -> str:
        """See `Kind.describe`."""
        how = f"fail with {self.error}" if self.how == "fail" else "stand still"
        what = "all operations" if self.reads else "all writes and deletions"
        return f"{super().describe(target)}, in which {what} {how}, of the storage of {target}"


def _read_kind(value: Any) -> Kind:
    """A kind from `{"kind": name, ...}`, or from its name alone."""
    named = {"kind": value} if isinstance(value, str) else value
    name = named.get("kind") if isinstance(named, Mapping) else None
    if not isinstance(name, str) or name not in KINDS:
        shown = value if name is None else name
        raise ValueError(f"{shown!r} is no kind of failure; the kinds are {', '.join(KINDS)}")
    return build(KINDS[name], {key: each for key, each in named.items() if key != "kind"})


register(Kind, _read_kind)
