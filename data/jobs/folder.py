"""The output folder of a job: its lock and the configuration that it belongs to.

A folder belongs to one configuration and one running process. On a local disk the lock is a kernel lock on
the folder itself, so that it ends with its process and leaves no lock file; stores have
`data.jobs.store_lock`. While the job is not finished, a folder in it holds its state.
"""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from data.dataset import MANIFEST_NAME, read_manifest
from data.jobs.files import durable_file, remove_leftovers
from data.jobs.location import Location
from data.jobs.store_lock import LOCK_NAME, store_locked
from data.jobs.verify import check_sizes

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FOR_THE_USER: Final = (*FULL_DISK, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of the system that last until the user changes something: exit code 2."""
_IDENTITY_NAME: Final = "identity.json"
_MOST_DIFFERENCES: Final = 5
_SHORT: Final = 80
"""Characters of a value in a message."""


@contextmanager
def named_in_errors(out: Path | Location) -> Iterator[None]:
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
def locked(place: Path | Location) -> Iterator[None]:
    """Lock the output folder, which is created if absent.

    Raises:
        ValueError: another running process has locked the folder, or it cannot be created.
    """
    out = Location.of(place)
    if out.local is None:
        with store_locked(out):
            yield
        return
    with named_in_errors(out):
        out.local.mkdir(parents=True, exist_ok=True)
        handle = os.open(out.local, os.O_RDONLY)
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
def begun(place: Path | Location, state_name: str, identity: Mapping[str, Any]) -> Iterator[None]:
    """Start a job in a locked folder, or continue an interrupted one; temporary files are removed at the end.

    Args:
        place: the folder.
        state_name: name of the folder in it for the job's state.
        identity: settings that decide the output.

    Raises:
        ValueError: the folder belongs to another configuration, or holds other files.
        OSError: the disk is full, with what to do.
    """
    out = Location.of(place)
    noted = out / state_name / _IDENTITY_NAME
    if noted.size() is not None:
        refuse_difference(out, json.loads(noted.read()), identity)
    else:
        strangers = sorted({*out.names()} - {state_name, LOCK_NAME})
        if strangers:
            raise ValueError(
                f"{out} holds other files ({strangers[0]}, ...); choose an empty or a new folder for --out"
            )
    try:
        remove_leftovers(out)
        _note(noted, identity)
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


def is_finished(out: Location, state_name: str, maker: str, identity: Mapping[str, Any]) -> bool:
    """Whether the folder already holds the job's data set.

    If a file of it is missing or has another size, it is turned into an unfinished one, to be made again.

    Args:
        out: the folder.
        state_name: name of the folder in it for the job's state.
        maker: module that makes the data set.
        identity: settings that decide the output.

    Raises:
        ValueError: it holds another data set.
    """
    if (out / MANIFEST_NAME).size() is None:
        return False
    manifest = read_manifest(out.root)
    provenance = manifest.provenance
    if provenance.get("maker") != maker:
        raise ValueError(f"{out} holds a data set that {maker} did not make; choose another --out")
    refuse_difference(out, provenance["identity"], identity)
    problems = check_sizes(out, manifest)
    if problems:
        more = ", ..." if len(problems) > 1 else ""
        print(f"{out} is damaged ({next(iter(problems.values()))}{more}) and is made again", file=sys.stderr)
        for path in problems.keys() & out.sizes().keys():  # a job keeps the vocabularies that it finds
            (out / path).delete()
        (out / state_name).delete_folder()
        _note(out / state_name / _IDENTITY_NAME, identity)
        (out / MANIFEST_NAME).delete()  # last: killed before that, the next start finds the same damage
    return not problems


def _note(noted: Location, identity: Mapping[str, Any]) -> None:
    with durable_file(noted) as sink:
        sink.write(json.dumps(identity, indent=1, sort_keys=True).encode())


def refuse_difference(out: Path | Location, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a ValueError if the configuration of a folder's files is not that of the job."""
    now = json.loads(json.dumps(now))
    differing = list(_differences("", there, now))
    if differing:
        more = len(differing) - _MOST_DIFFERENCES
        details = "; ".join(differing[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"{out} belongs to another configuration ({details}). Choose another --out, or remove it"
        )


def _differences(key: str, there: Any, now: Any) -> Iterator[str]:
    """What differs between two JSON values, by the innermost keys."""
    if isinstance(there, Mapping) and isinstance(now, Mapping):
        for inner in sorted({*there, *now}):
            yield from _differences(f"{key}.{inner}" if key else inner, there.get(inner), now.get(inner))
    elif isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        for index, pair in enumerate(zip(there, now, strict=True)):
            yield from _differences(f"{key}[{index}]", *pair)
    elif there != now:
        yield f"{key}: there {_short(there)}, now {_short(now)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHORT else text[:_SHORT] + "..."
