"""The output folder of a job: its lock and the configuration that it belongs to.

A folder belongs to one configuration and one running process. The lock is a kernel lock on the folder itself,
so that it ends with its process and leaves no lock file. While the job is not finished, a folder in it holds
its state.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from data.jobs.files import durable_file, remove_leftovers

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IDENTITY_NAME: Final = "identity.json"


@contextmanager
def named_in_errors(out: Path) -> Iterator[None]:
    """Raise a ValueError that names `out` for errors of the file system, except a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise ValueError(
            f"{out} cannot be made or read ({error.strerror}); choose another --out or change its permissions"
        ) from error


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the output folder, which is created if absent.

    Raises:
        ValueError: another running process has locked the folder, or it cannot be created.
    """
    with named_in_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{out} is in use by another live process; wait for it or choose another --out"
            ) from error
        yield
    finally:
        os.close(handle)


@contextmanager
def begun(out: Path, state: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Start a job in a locked folder, or continue an interrupted one; temporary files are removed at the end.

    Args:
        out: the folder.
        state: the folder in it for the job's state.
        identity: settings that decide the output.

    Raises:
        ValueError: the folder belongs to another configuration, or holds other files.
        OSError: the disk is full, with what to do.
    """
    path = state / _IDENTITY_NAME
    if path.exists():
        refuse_difference(out, json.loads(path.read_text()), identity)
    else:
        strangers = sorted(entry.name for entry in out.iterdir() if entry != state)
        if strangers:
            raise ValueError(
                f"{out} holds other files ({strangers[0]}, ...); choose an empty or a new folder for --out"
            )
    try:
        remove_leftovers(out)
        with durable_file(path) as sink:
            sink.write(json.dumps(identity, indent=1, sort_keys=True).encode())
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise OSError(
            error.errno,
            f"the disk is full: no room to write {out} ({os.strerror(error.errno)}). Finished files are "
            "kept: free some space and start the same command again",
        ) from error
    finally:
        remove_leftovers(out)


def refuse_difference(out: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a ValueError if the configuration of a folder's files is not that of the job."""
    now = json.loads(json.dumps(now))
    differing = [key for key in sorted({*there, *now}) if there.get(key) != now.get(key)]
    if differing:
        details = "; ".join(
            f"{key}: there {_short(there.get(key))}, now {_short(now.get(key))}" for key in differing
        )
        raise ValueError(
            f"{out} belongs to another configuration ({details}). Choose another --out, or remove that folder"
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
