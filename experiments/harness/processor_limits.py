"""Limits of processor time for single workers, by a control group of each."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PERIOD_US: Final = 20_000
"""The kernel gives a group its share anew in each period, unless another one is asked for."""
FIRST: Final = Path("/sys/fs/cgroup/cpu")
"""Where groups are made by version 1 of control groups; by version 2 in the folder above."""


class NoControlGroupError(OSError):
    """This machine lets nobody make control groups."""


@dataclass(frozen=True)
class Group:
    """A control group, into which a process goes with its children."""

    folder: Path
    period_us: int = PERIOD_US

    def limit(self, cores: float | None) -> None:
        """Give the group this many cores at most; None: as many as there are."""
        quota = -1 if cores is None else round(cores * self.period_us)
        if (self.folder / "cpu.cfs_quota_us").exists():
            (self.folder / "cpu.cfs_period_us").write_text(str(self.period_us))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.folder / "cpu.max").write_text(f"{'max' if cores is None else quota} {self.period_us}")

    def enter(self, pid: int | None = None) -> None:
        """Put a process with its threads into the group; None: this one."""
        (self.folder / "cgroup.procs").write_text(str(pid or os.getpid()))


@contextmanager
def groups(count: int, period_us: int = PERIOD_US) -> Iterator[list[Group]]:
    """Make groups without limits, and remove them when their processes have ended.

    Args:
        count: how many.
        period_us: of limits; a process that waits in between may use a period's share at once.

    Raises:
        NoControlGroupError: that is not possible here.
    """
    parent = FIRST if FIRST.is_dir() else FIRST.parent
    folders = [parent / f"cpr-limits-{os.getpid()}-{number}" for number in range(count)]
    try:
        _make(folders)
        yield [Group(folder, period_us) for folder in folders]
    finally:
        for folder in folders:
            if folder.is_dir():
                folder.rmdir()


def _make(folders: Sequence[Path]) -> None:
    try:
        for folder in folders:
            folder.mkdir()
            if not list(folder.glob("cpu.*")):
                raise OSError(f"{folder.parent} has no controller of processor time")
    except OSError as error:
        raise NoControlGroupError(
            f"processor time is limited by control groups, which cannot be made here ({error}): run it as "
            "root on Linux"
        ) from error
