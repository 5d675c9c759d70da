"""State of a job's output folder: its lock and its configuration.

A folder belongs to one configuration and one running process. The lock is a kernel lock on the folder itself,
so that it ends with its process and leaves no lock file.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from data.dataset import MANIFEST_NAME, read_manifest
from data.prepare.pieces import STATE_FOLDER, durable_file, remove_leftovers

_IDENTITY_NAME: Final = "identity.json"
MAKER: Final = "data.prepare"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the output folder, which is created if absent.

    Raises:
        ValueError: another running process has locked the folder, or it cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"{out} cannot be a folder: there is a file in its place; choose another --out"
        ) from error
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL}:
            raise
        raise ValueError(f"{out} cannot be made ({error.strerror}); choose another --out") from error
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ValueError(
            f"{out} is in use by another live `data.prepare`; wait for it or choose another --out"
        ) from error
    try:
        yield
    finally:
        os.close(handle)


def is_finished(out: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder already holds this data set.

    Raises:
        ValueError: the folder holds another data set.
    """
    if not (out / MANIFEST_NAME).exists():
        return False
    provenance = read_manifest(str(out)).provenance
    if provenance.get("maker") != MAKER:
        raise ValueError(f"{out} holds a data set that data.prepare did not make; choose another --out")
    _refuse_difference(out, provenance["identity"], identity)
    return True


def open_state(out: Path, identity: Mapping[str, Any]) -> Path:
    """Start a job in the folder, or continue an interrupted one.

    Returns:
        The folder of the job's state.

    Raises:
        ValueError: the folder belongs to another configuration, or holds other files.
    """
    state = out / STATE_FOLDER
    path = state / _IDENTITY_NAME
    if path.exists():
        _refuse_difference(out, json.loads(path.read_text()), identity)
        remove_leftovers(out)
        return state
    strangers = sorted(entry.name for entry in out.iterdir() if entry != state)
    if strangers:
        raise ValueError(
            f"{out} holds other files ({strangers[0]}, ...); choose an empty or a new folder for --out"
        )
    with durable_file(path) as sink:
        sink.write(json.dumps(identity, indent=1, sort_keys=True).encode())
    return state


def close_state(out: Path) -> None:
    """Remove the job's state: the data set is complete."""
    state = out / STATE_FOLDER
    if state.exists():
        remove_leftovers(out)
        shutil.rmtree(state)


def _refuse_difference(out: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
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
