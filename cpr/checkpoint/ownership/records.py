"""Records of the owners of a checkpoint directory: who owns it, and which saves count.

    owners/00000003-5f1c9e07.json      the record of the owner of epoch 3, under a unique name

A run that takes a directory writes a record of the next epoch; every save is in a folder that names the epoch
of its owner. The highest epoch owns the directory, so a process that was paused while another run took over
finds the higher epoch before it commits or deletes anything. A write that was in flight all that time still
arrives, but in a folder of its own: the new owner's record lists the older saves that it found, and no other
save of an older epoch counts. The last record also says whether the run is finished.
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
"""Records are padded to multiples of this size, so that a record is rarely replaced by a longer one while it
is read; such a record is read again."""
READS: Final = 3
LONGEST_BEAT_S: Final = 3600.0
"""Longest interval between renewals that a record may claim."""

_NAME: Final = re.compile(r"(\d{8,18})-([0-9a-f]+)\.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """Names the workers that claim a directory: a later generation of their session may take it over."""

    session: str = ""
    """Session whose generations of workers succeed each other as owners; empty: none."""
    generation: int = 0


NO_CLAIMANT: Final = Claimant()
"""The claimant of a process without a session."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The record of one owner of a directory."""

    epoch: int
    token: str
    """Random; part of the record's name."""
    run: str
    host: str
    place: str
    """Boot id and process id namespace: where `pid` means something."""
    pid: int
    started: int
    """Start time of the process in the kernel's ticks: tells it from a later process with the same pid."""
    session: str = ""
    """Session whose generations of workers succeed each other as owners; empty: none."""
    generation: int = 0
    launches: tuple[str, ...] = ()
    """Launches of the workers that made the saves here; the owner's own once its workers have begun."""
    beat: int = 0
    """Incremented at each renewal."""
    beat_s: float = 0.0
    accepted: tuple[tuple[int, int], ...] | None = None
    """Sequence and epoch of the saves of older epochs that still count; None: not listed yet, and this owner
    has saved nothing."""
    released: bool = False
    finished: int | None = None
    """Training steps done when the run finished; None: it has not, as far as this owner knows."""

    def __str__(self) -> str:
        return f"run {self.run!r} (process {self.pid} on {self.host})"

    @property
    def path(self) -> str:
        """Path of the record, relative to the checkpoint directory."""
        return f"{OWNERS}/{self.epoch:08d}-{self.token}.json"

    def counts(self, sequence: int, epoch: int) -> bool:
        """Whether a save counts: it is of this epoch or later, or in the list of accepted saves."""
        return epoch >= self.epoch or self.accepted is None or (sequence, epoch) in self.accepted

    def to_bytes(self) -> bytes:
        """JSON of the record, padded so that its size rarely changes."""
        text = json.dumps(asdict(self))
        return (text.ljust(-(-(len(text) + 1) // BLOCK_BYTES) * BLOCK_BYTES - 1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Owner":
        """Parse an owner's record.

        Raises:
            ValueError: `data` is not a record, or damaged.
        """
        owner = build(cls, parse(data))
        if owner.beat_s > LONGEST_BEAT_S:
            raise ValueError(f"its interval between renewals is {owner.beat_s} s, above {LONGEST_BEAT_S} s")
        return owner


def write_owner(storage: Storage, owner: Owner) -> None:
    """Write or replace the record of an owner."""
    with storage.create(owner.path) as sink:
        sink.write(memoryview(owner.to_bytes()))


def epochs(storage: Storage) -> list[tuple[int, str]]:
    """Epoch and token of all records, lowest first; lists the folder and reads no record."""
    matches = (_NAME.fullmatch(name) for name in storage.list(OWNERS))
    return sorted((int(match[1]), match[2]) for match in matches if match)


def newest_owner(storage: Storage) -> Owner | None:
    """The record of the highest epoch; None if the directory never had an owner."""
    return next(_newest_first(storage), None)


def fence(storage: Storage) -> Owner | None:
    """The newest record that lists the older saves which count; None: there is none."""
    return next((owner for owner in _newest_first(storage) if owner.accepted is not None), None)


def damaged_records(storage: Storage) -> list[str]:
    """Messages on damaged records, each with the file's name."""
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
    """A record; or why it is damaged; or None if it was deleted meanwhile."""
    path, problem = f"{OWNERS}/{epoch:08d}-{token}.json", ""
    for _ in range(READS):  # the record may just be being replaced by a longer one
        try:
            owner = Owner.from_bytes(read_file(storage, path))
            if owner.path == path:
                return owner
            problem = f"it says that it is {owner.path}"
        except CorruptFileError:
            return None
        except ValueError as error:
            problem = str(error)
    return f"{path} is not used, because it is damaged ({problem}); other records decide which saves count"
