"""Files that come into a folder."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import numpy as np
from pyarrow import fs

from data.jobs.location import Location

logger = logging.getLogger(__name__)

SETTLE_S: Final = 3.0
"""Age of a file from which it is read: until then it may be written to, and others may appear that were
written before it."""
LIST_EVERY_S: Final = 1.0
PATIENCE_S: Final = 60.0
"""Time for which a file or a folder that cannot be read is tried again."""


class NewFile(NamedTuple):
    """A file that has come; ordered by time."""

    written_ns: int
    """In nanoseconds of Unix time."""
    path: str
    """In the folder."""


class WarnOnce:
    """Logs a warning about a file or folder, if it has not been logged before."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, place: Location, what: str) -> None:
        """Log `place` and `what` is wrong with it."""
        message = f"{place} {what}"
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s", message)


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
        self._listed_s = self._warned_s = -np.inf
        self._warn_once = WarnOnce()
        self.is_quiet = False
        """Whether no file is there that is still to be read, or to be tried again."""

    def new_files(self) -> Iterable[NewFile] | None:
        """Files that have come since the last call, in order of time.

        Returns:
            None if the folder cannot be listed, or was listed a moment ago.
        """
        if time.monotonic() - self._listed_s < LIST_EVERY_S:
            return None
        self.is_quiet = False
        selector = fs.FileSelector(self._folder.path, recursive=True)
        try:
            infos = self._folder.filesystem.get_file_info(selector)
        except OSError as error:
            self._warn_of(error)
            return None
        finally:
            self._listed_s = time.monotonic()
        self.is_quiet = True
        new = [file for file in sorted(self._files(infos)) if self._is_ready(file)]
        self._known.update(new)
        return [file for file in new if not self._is_other_name(file.path)]

    def put_off(self, file: NewFile) -> bool:
        """Find a file again the next time, if it is young.

        Returns:
            Whether it is: perhaps the store could not be reached for a moment.
        """
        if self._age_s(file) >= PATIENCE_S:
            return False
        self._known.discard(file)
        self.is_quiet = False
        return True

    def _warn_of(self, error: OSError) -> None:
        if time.monotonic() - self._warned_s >= PATIENCE_S:
            self._warned_s = time.monotonic()
            is_absent = isinstance(error, FileNotFoundError)
            problem = "is not there yet" if is_absent else f"cannot be listed ({error})"
            logger.warning("%s %s: looking again every second", self._folder, problem)

    def _files(self, infos: Iterable[fs.FileInfo]) -> Iterator[NewFile]:
        """Files that are not known, and not passed over by their names."""
        start = len(self._folder.path.rstrip("/")) + 1
        for info in infos:
            try:
                if not info.is_file:
                    continue
                file = NewFile(info.mtime_ns, info.path[start:])
            except UnicodeDecodeError as error:
                what = "has a file that is not read, as its name is not UTF-8"
                self._warn_once(self._folder, f"{what}: {error.object!r}")
                continue
            if file not in self._known and not _is_passed_over(file.path):
                yield file

    def _is_ready(self, file: NewFile) -> bool:
        """Whether a file is old enough to be whole."""
        age_s = self._age_s(file)
        if age_s < -PATIENCE_S:  # not by the skew of two clocks
            self._warn_once(
                self._folder / file.path,
                "has a time in the future, and is not read until then: give it the present one (`touch`)",
            )
        elif age_s < SETTLE_S:
            self.is_quiet = False
        return age_s >= SETTLE_S

    def _age_s(self, file: NewFile) -> float:
        return self._now() - file.written_ns / 1e9

    def _is_other_name(self, path: str) -> bool:
        """Whether a link on a path leads to what is in the folder, and found there under its own name."""
        if self._folder.local is None:
            return False
        folder = self._folder.local.resolve()
        for name in (path, *map(str, PurePosixPath(path).parents)):
            own = (folder / name).resolve()
            if own == folder / name or not own.is_relative_to(folder):
                continue
            # hidden files are not read themselves: a link to one is how some writers publish it
            if not _is_passed_over(str(own.relative_to(folder))) or own == folder:
                self._warn_once(
                    self._folder, "has links to what is in it, which is read once, under its own name"
                )
                return True
        return False


def _is_passed_over(path: str) -> bool:
    """Whether a name is that of a file that is being written, or of bookkeeping."""
    parts = path.split("/")
    return any(part.startswith((".", "_")) for part in parts) or parts[-1].endswith(".tmp")
