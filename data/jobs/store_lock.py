"""The lock of an output folder on a store: a small file that its owner renews.

Stores have no locks that end with their process. Who finds the file watches whether it still changes, by its
own clock alone; if it does not for `PATIENCE_S`, its owner counts as dead, and the folder is taken over. That
keeps two commands apart that are started by mistake, but is no guarantee: an owner that was merely paused may
continue while its successor runs. Both then make the same data set, since a folder belongs to one
configuration.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from data.jobs.files import durable_file
from data.jobs.location import Location

LOCK_NAME: Final = ".lock"
PATIENCE_S: Final = 12.0
"""How long the file of a live owner stays unchanged at most."""
BEAT_S: Final = 3.0
SETTLE_S: Final = 1.0
"""Pause after which the later one of two owners that began at the same moment is known."""


@contextmanager
def store_locked(out: Location) -> Iterator[None]:
    """Hold the lock of a folder on a store.

    Raises:
        ValueError: another live process holds it.
        OSError: the store cannot be reached, read or written.
    """
    lock, token = out / LOCK_NAME, secrets.token_hex(8)
    before = _read(lock)
    if before is not None and _changes(out, lock, before):
        raise ValueError(_in_use(out, before))
    _write(lock, token, 0)
    time.sleep(SETTLE_S)
    rival = _read(lock)
    if rival is not None and rival["token"] != token:
        raise ValueError(_in_use(out, rival))
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(lock, token, ended), name="store-lock", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        with suppress(OSError):
            if _belongs_to(lock, token):
                lock.delete()


def _changes(out: Location, lock: Location, before: dict[str, Any]) -> bool:
    """Whether the lock's file is renewed by a live process."""
    who = _named(before)
    print(f"{out} is locked by {who}: waiting up to {PATIENCE_S:g} s to see if that lives", file=sys.stderr)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        now = _read(lock)
        if now != before:
            return now is not None
    return False


def _renew(lock: Location, token: str, ended: threading.Event) -> None:
    beat = 0
    while not ended.wait(BEAT_S):
        beat += 1
        with suppress(OSError):  # the next one may reach the store
            if not _belongs_to(lock, token):
                return
            _write(lock, token, beat)


def _write(lock: Location, token: str, beat: int) -> None:
    content = {"token": token, "beat": beat, "host": socket.gethostname(), "process": os.getpid()}
    with durable_file(lock) as sink:
        sink.write(json.dumps(content).encode())


def _read(lock: Location) -> dict[str, Any] | None:
    try:
        return dict(json.loads(lock.read()))
    except FileNotFoundError:
        return None


def _belongs_to(lock: Location, token: str) -> bool:
    owner = _read(lock)
    return owner is not None and owner["token"] == token


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']}"


def _in_use(out: Location, owner: dict[str, Any]) -> str:
    return f"{out} is in use by {_named(owner)}; wait for it or choose another --out"
