"""A run's folder in shared memory on this machine, with a segment for each worker.

All workers of a run on a machine, and no other run, share a key, so that no other run takes over its
segments.
"""

import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

from cpr.checkpoint.storage.base import open_storage
from cpr.errors import DamagedMemoryError, ResidentMemoryError
from cpr.processes import Process, agent_pid
from cpr.resident.folders import (
    OWNER_FILE,
    PRIVATE_FOLDER,
    UNSAVED_FILE,
    NotPrivateError,
    alone_in,
    is_locked,
    live_segments,
    make_private,
    reading,
    remove_home,
    segment_folders,
    unsaved_segments,
    user_folder,
    why_not_private,
)
from cpr.resident.segment import Segment

KEY_CHARACTERS: Final = 24
LAUNCH_VARIABLE: Final = "CPR_LAUNCH"
RUN_ID_VARIABLE: Final = "TORCHELASTIC_RUN_ID"


def run_key(uri: str) -> str:
    """Key of a run on this machine, made of its checkpoint directory and its launcher.

    The launcher is the `cpr run` above torchrun if there is one, else `--rdzv-id` if one was given, else the
    agent itself. In this order, because `--standalone` gives each new torchrun an id of its own.
    """
    launched_by = os.environ.get(LAUNCH_VARIABLE) or os.environ.get(RUN_ID_VARIABLE, "none")
    if launched_by == "none":
        launched_by = str(Process.find(agent_pid()))
    is_local = "://" not in uri or uri.startswith("file://")
    place = open_storage(uri).uri if is_local else uri
    text = f"{place}\n{launched_by}"
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]


class Home:
    """The folder of a run.

    Raises:
        ValueError: the root is no folder.
        ResidentMemoryError: the root cannot be used, or the user's folder there is not private.
    """

    def __init__(self, run_key: str, root: str | Path | None = None) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", run_key):
            raise ValueError(f"{run_key!r} is no key of a run; see run_key")
        self.folder = user_folder(root) / run_key
        if not self.folder.parent.parent.is_dir():
            raise ValueError(
                f"{self.folder.parent.parent} is no folder; set CPR_RESIDENT_ROOT to a memory file system"
            )
        self._make()

    def create(self, owner: str) -> Segment:
        """Create a segment, owned by this process; `owner`, such as "rank3", is part of the folder's name."""
        if not re.fullmatch(r"[A-Za-z0-9_]+", owner):
            raise ValueError(f"{owner!r} cannot be part of a folder's name; use letters and digits")
        while True:
            self._make()
            with alone_in(self.folder) as there:
                if there:
                    folder = self.folder / f"{owner}-{secrets.token_hex(4)}"
                    folder.mkdir(PRIVATE_FOLDER)
                    segment = Segment(folder)
                    segment._claim()
                    segment.status.begin(generation=0)
                    return segment

    def find(self) -> tuple[list[Segment], list[str]]:
        """Find segments that can be claimed: sealed, whole, and their owner is dead.

        Memory of dead owners that is damaged, or was never sealed, is freed.

        Returns:
            The segments, and why others were refused.

        Raises:
            UnreadableMemoryError: some cannot be read now, or were written by another version. They are kept,
                because they may be whole.
        """
        found, refused = [], []
        with reading(self.folder), alone_in(self.folder):
            for folder in segment_folders(self.folder):
                reason, segment = _examine(folder)
                if segment:
                    found.append(segment)
                else:
                    refused.append(f"{folder.name}: {reason}")
        return found, refused

    def remove(self) -> bool:
        """Free all memory of the run; returns False, and does nothing, while a process owns a segment.

        Nothing is freed either if a segment is left that another run of the same name could not save.
        """
        with alone_in(self.folder) as there:
            if there and (live_segments(self.folder) or unsaved_segments(self.folder)):
                return False
            if there:
                remove_home(self.folder)
        return True

    def _make(self) -> None:
        root = self.folder.parent.parent
        try:
            while True:
                try:
                    make_private(self.folder.parent)
                    make_private(self.folder)
                    return
                except FileNotFoundError:  # the end of another run removed the user's folder meanwhile
                    if not root.is_dir():
                        raise
        except OSError as error:
            raise ResidentMemoryError(
                f"{self.folder} cannot be used: {error}. What to do: set CPR_RESIDENT_ROOT to a memory file "
                "system that you may write to"
            ) from error


def _examine(folder: Path) -> tuple[str, Segment | None]:
    """Return a segment that can be claimed, or why it cannot; remove it if it can never be used.

    What a run could not save stays even then: only a user decides that it is of no use.
    """
    try:
        if reason := why_not_private(folder, is_folder=True):
            return f"{reason}; left alone", None
        if is_locked(folder / OWNER_FILE):
            return "its owner is alive", None
    except (FileNotFoundError, NotPrivateError) as error:
        return f"{error}; left alone", None
    try:
        segment = Segment(folder)
        if segment.layout:
            return "", segment
        reason = "its owner died before it was complete"
    except DamagedMemoryError as error:
        reason = str(error)
    if (folder / UNSAVED_FILE).exists():
        outcome = "left alone, because it was not saved"
    else:
        try:
            shutil.rmtree(folder)
            outcome = "removed"
        except OSError as error:
            outcome = f"cannot be removed: {error}"
    return f"{reason}; {outcome}", None
