"""Files that come into a folder."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from pyarrow import fs

from data.jobs.location import Location

logger = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
"""Age of a file from which it is read: until then it may be written to, and others may appear that were
written before it."""
LIST_EVERY_S: Final = 1.0
LISTING_SHARE: Final = 0.1
"""Largest share of the time in which a folder is listed, which takes seconds with many files."""
FIRST: Final = 10
"""Warnings alike of which each is logged."""
PATIENCE_S: Final = 60.0
"""Time for which a file or a folder that cannot be read is tried again."""


class NewFile(NamedTuple):
    """A file that has come; ordered by time."""

    written_ns: int
    """In nanoseconds of Unix time."""
    path: str
    """In the folder."""


class WarnOnce:
    """Logs a warning about a file once, and of many alike the first ten, the hundredth and so on."""

    def __init__(self) -> None:
        self._places: dict[str, set[str]] = {}
        """By what is wrong."""

    def __call__(self, place: Location, what: str) -> None:
        """Log `place` and `what` is wrong with it."""
        alike = self._places.setdefault(what, set())
        if str(place) in alike:
            return
        alike.add(str(place))
        if len(alike) <= FIRST or str(len(alike)).strip("0") == "1":
            more = f" (one of {len(alike):,} alike so far)" if len(alike) >= FIRST else ""
            logger.warning("%s %s%s", place, what, more)


class FolderListing:
    """Finds files that come into a folder, on any pyarrow filesystem.

    Names that begin with a dot or an underscore, and those that end in `.tmp`, are passed over, and so are
    links to what is in the folder.

    Args:
        folder: may not exist yet.
        now: the time in seconds.
    """

    def __init__(self, folder: Location, now: Callable[[], float]) -> None:
        self._folder, self._now = folder, now
        self._known: set[NewFile] = set()
        self._there: set[NewFile] = set()
        """Those of the newest listing that has shown any."""
        self._missing_s: dict[NewFile, float] = {}
        """When files were missed first, by the monotonic clock."""
        self._next_s = self._warned_s = -np.inf
        self._warn_once = WarnOnce()
        self.is_quiet = False
        """Whether no file is there that is still to be read, or to be tried again."""

    def new_files(self) -> Sequence[NewFile] | None:
        """Files that have come since the last call, in order of time.

        Returns:
            None if the folder was listed a moment ago, cannot be listed, or has no files.
        """
        if time.monotonic() < self._next_s:
            return None
        there = self._list()
        self.is_quiet = there is not None
        if not there:
            if there is not None and not self._there:
                self._warn("has no files")
            return None
        new = [file for file in sorted(there - self._known) if self._is_ready(file)]
        self._known.update(new)
        return new

    def put_off(self, files: Iterable[NewFile]) -> None:
        """Find files again the next time."""
        self._known.difference_update(files)
        self.is_quiet = False

    def expect(self, files: Iterable[NewFile]) -> None:
        """Miss those of some files that are not there, as if they had been."""
        self._there |= set(files)

    def has_lost(self, file: NewFile) -> bool:
        """Whether a file, which cannot be found, was replaced, or is missing among others for some time.

        Until then, and where no others are there, its storage may be away for a moment.
        """
        if file in self._there and not self._list():
            self._warn("has no files any more, and not all of them have been read")
        if file in self._there:
            return False
        since_s = self._missing_s.setdefault(file, time.monotonic())
        is_replaced = any(other.path == file.path for other in self._there)
        is_lost = is_replaced or time.monotonic() - since_s >= PATIENCE_S
        if not is_lost:
            self._warn_once(self._folder / file.path, "is not there now: waiting for it, a minute at most")
        return is_lost

    def _list(self) -> set[NewFile] | None:
        """List all files; None if that fails."""
        begin_s = time.monotonic()
        try:
            there = set(self._files())
        except OSError as error:
            is_absent = isinstance(error, FileNotFoundError)
            self._warn("is not there" if is_absent else f"cannot be listed ({error})")
            return None
        finally:
            end_s = time.monotonic()
            self._next_s = end_s + max(LIST_EVERY_S, (end_s - begin_s) / LISTING_SHARE)
        if there:
            self._missing_s |= dict.fromkeys(self._there - there, end_s)
            for file in self._missing_s.keys() & there:
                del self._missing_s[file]
            self._there = there
        return there

    def _warn(self, problem: str) -> None:
        if time.monotonic() - self._warned_s >= PATIENCE_S:
            self._warned_s = time.monotonic()
            logger.warning("%s %s: looking again every second", self._folder, problem)

    def _files(self) -> Iterator[NewFile]:
        """All files but those that are passed over by their names."""
        if self._folder.local is not None:
            yield from self._local_files(self._folder.local)
            return
        start = len(self._folder.path.rstrip("/")) + 1
        for info in self._folder.filesystem.get_file_info(fs.FileSelector(self._folder.path, recursive=True)):
            if info.is_file and not _is_passed_over(info.path[start:]):
                yield NewFile(info.mtime_ns, info.path[start:])

    def _local_files(self, folder: Path) -> Iterator[NewFile]:
        """The same on the local disk, where pyarrow would not find its way out of links that make circles."""
        root = folder.resolve()
        left = [("", frozenset({root}))]
        while left:
            within, above = left.pop()
            for entry in self._entries(folder, within):
                path = within + entry.name
                if _is_passed_over(f"{path}/") or not self._is_text(path):
                    continue
                try:
                    if entry.is_dir():
                        if not self._is_other_name(root, path, above):
                            left.append((f"{path}/", above | {(root / path).resolve()}))
                    elif entry.is_file() and not (
                        _is_passed_over(path) or (entry.is_symlink() and self._is_other_name(root, path))
                    ):
                        yield NewFile(entry.stat().st_mtime_ns, path)
                    elif entry.is_symlink() and not entry.is_file():
                        self._warn_once(
                            self._folder / path, "is a link to what is not there now, and is read when it is"
                        )
                except OSError:
                    continue  # it was deleted just now, or is a link to itself

    def _entries(self, folder: Path, within: str) -> Sequence[os.DirEntry[str]]:
        """What is in a folder, or in one below it that may be closed to this user or deleted just now."""
        try:
            with os.scandir(folder / within) as entries:
                return list(entries)
        except (PermissionError, FileNotFoundError) as error:
            if not within:
                raise
            if isinstance(error, PermissionError):
                self._warn_once(self._folder / within, "is not read, as this user may not list it")
            return []

    def _is_text(self, path: str) -> bool:
        try:
            path.encode()
        except UnicodeEncodeError:
            what = "has a file that is not read, as its name is not UTF-8"
            self._warn_once(self._folder, f"{what}: {os.fsencode(path)!r}")
            return False
        return True

    def _is_ready(self, file: NewFile) -> bool:
        """Whether a file is old enough to be whole."""
        age_s = self._now() - file.written_ns / 1e9
        if age_s < -PATIENCE_S:  # not by the skew of two clocks
            self._warn_once(
                self._folder / file.path,
                "has a time in the future, and is not read until then: give it the present one (`touch`)",
            )
        elif age_s < SETTLE_S:
            self.is_quiet = False
        return age_s >= SETTLE_S

    def _is_other_name(self, root: Path, path: str, above: Collection[Path] = ()) -> bool:
        """Whether a path below the folder `root` is another name of what is in it, or of a folder `above`."""
        own = (root / path).resolve()
        is_other = own in above
        if own != root / path and own.is_relative_to(root):
            # hidden files are not read themselves: a link to one is how some writers publish it
            is_other = is_other or not _is_passed_over(str(own.relative_to(root)))
        if is_other:
            self._warn_once(
                self._folder, "has links to what is in it, which is read once, under its own name"
            )
        return is_other


def _is_passed_over(path: str) -> bool:
    """Whether a name is that of a file that is being written, or of bookkeeping."""
    parts = path.split("/")
    return any(part.startswith((".", "_")) or part.endswith(".tmp") for part in parts)
