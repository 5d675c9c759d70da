"""Who owns a checkpoint directory, and which saves count: ownership is an epoch, a number that only grows.

    owners/00000003-5f1c9e07.json      the record of the owner of epoch 3, under a name nobody else uses

Whoever takes a directory writes a record of the next epoch; every save is in a folder that names the epoch of
its owner. The highest epoch owns the directory, so a process that was paused while another took over finds a
higher one before it commits or deletes anything. A write of its that was under way all that time still lands,
but in a folder of its own: the new owner's record lists the older saves it found, and no other save of an
older epoch counts. The last record also says whether the run is finished.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from cpr.checkpoint.storage.base import Storage, read_file
from cpr.errors import CorruptFileError
from cpr.strict_json import build, parse

OWNERS: Final = "owners"
BLOCK_BYTES: Final = 1024
"""Records are padded to multiples of this, so that a reader seldom meets one that is being replaced by a
longer one; it reads such a record again."""
READS: Final = 3
LONGEST_BEAT_S: Final = 3600.0
"""No owner renews its record more seldom."""

_NAME: Final = re.compile(r"(\d{8,18})-([0-9a-f]+)\.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """Whose workers take a directory, so that their successors are known from strangers."""

    session: str = ""
    """Whose generations of workers hand the directory on; empty: nobody's."""
    generation: int = 0
    """Of these workers."""


NOBODYS: Final = Claimant()
"""Of a process that follows nobody and that nobody follows."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """One owner of a directory, as its record says."""

    epoch: int
    token: str
    """Random; part of the record's name."""
    run: str
    """Run id, for people."""
    host: str
    place: str
    """Boot id and process id namespace: where `pid` means something."""
    pid: int
    started: int
    """When the process started, in the kernel's ticks: tells it from a later one of the same number."""
    session: str = ""
    """Whose generations of workers hand the directory on; empty: nobody's."""
    generation: int = 0
    """Of those workers."""
    launches: tuple[str, ...] = ()
    """What launched the workers of the run whose saves are here; its own only once its workers have begun."""
    beat: int = 0
    """Goes up by one at each renewal."""
    beat_s: float = 0.0
    """Seconds between renewals."""
    accepted: tuple[tuple[int, int], ...] | None = None
    """Sequence and epoch of the saves of older epochs that still count; None: they are not listed yet, and
    this owner has saved nothing."""
    released: bool = False
    """Whether it has let go of the directory."""
    finished: int | None = None
    """Training steps done when its run reached its end; None: it did not, as far as this owner knows."""

    def __str__(self) -> str:
        return f"run {self.run!r} (process {self.pid} on {self.host})"

    @property
    def path(self) -> str:
        """Of its record."""
        return f"{OWNERS}/{self.epoch:08d}-{self.token}.json"

    def counts(self, sequence: int, epoch: int) -> bool:
        """Whether a save of this epoch counts under this owner, whose record lists older ones."""
        return epoch >= self.epoch or self.accepted is None or (sequence, epoch) in self.accepted

    def to_bytes(self) -> bytes:
        """As it is stored."""
        text = json.dumps(asdict(self))
        return (text.ljust(-(-(len(text) + 1) // BLOCK_BYTES) * BLOCK_BYTES - 1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Owner":
        """Read one back.

        Raises:
            ValueError: this program did not write it.
        """
        owner = build(cls, parse(data))
        if owner.beat_s > LONGEST_BEAT_S:
            raise ValueError(f"it is renewed every {owner.beat_s} s, which nobody would wait for")
        return owner


def write_owner(storage: Storage, owner: Owner) -> None:
    """Write a record, or replace it.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    with storage.create(owner.path) as sink:
        sink.write(memoryview(owner.to_bytes()))


def epochs(storage: Storage) -> list[tuple[int, str]]:
    """Epoch and token of all records, lowest first; nothing is read.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    matches = (_NAME.fullmatch(name) for name in storage.list(OWNERS))
    return sorted((int(match[1]), match[2]) for match in matches if match)


def newest_owner(storage: Storage) -> Owner | None:
    """The record of the highest epoch; None where nobody has ever owned the directory.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    return next(_newest_first(storage), None)


def fence(storage: Storage) -> Owner | None:
    """The newest record that lists the older saves which count; None: there is none, and all saves count.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    return next((owner for owner in _newest_first(storage) if owner.accepted is not None), None)


def damaged_records(storage: Storage) -> list[str]:
    """What is wrong with records that are not used; each names its file.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    read = (_read_owner(storage, epoch, token) for epoch, token in epochs(storage))
    return [owner for owner in read if isinstance(owner, str)]


def _newest_first(storage: Storage) -> Iterator[Owner]:
    for epoch, token in reversed(epochs(storage)):
        owner = _read_owner(storage, epoch, token)
        if isinstance(owner, str):
            logger.warning("%s of %s", owner, storage.uri)
        elif owner is not None:
            yield owner


def _read_owner(storage: Storage, epoch: int, token: str) -> Owner | str | None:
    """A record; what is wrong with it; or None if it went away."""
    path, problem = f"{OWNERS}/{epoch:08d}-{token}.json", ""
    for _ in range(READS):
        try:
            owner = Owner.from_bytes(read_file(storage, path))
            if owner.path == path:
                return owner
            problem = f"it says that it is {owner.path}"
        except CorruptFileError:
            return None
        except ValueError as error:
            problem = str(error)
    return f"{path} is not used, because it is damaged ({problem}): which saves count is told by others alone"
