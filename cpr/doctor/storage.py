"""Check of the checkpoint directory by one node: consistency, room, and place."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cpr.checkpoint.storage.base import is_local, open_storage, read_file
from cpr.doctor.finding import Finding, problem, warning
from cpr.errors import CheckpointError, CorruptFileError
from cpr.humanize import size_text

LEAST_FREE_BYTES: Final = 10**9
"""Less room is a mistake, whatever the tables take."""


def check_storage(uri: str, needed_bytes: int | None = None) -> Finding:
    """Check that a checkpoint directory keeps what its ownership relies on: atomic writes, seen at once.

    A file is written, replaced and deleted, and another client looks after each. A local directory must also
    have room for a save of the tables (None: not known), and be where it should be.
    """
    missing = _missing_folders(uri)
    folder, data, wrong = f"doctor-{secrets.token_hex(4)}", b"", set()
    path = f"{folder}/record"
    try:
        writer, reader = open_storage(uri), open_storage(uri)
        try:
            for data in (b"first", b"replaced"):
                with writer.create(path) as sink:
                    sink.write(memoryview(data))
                if list(reader.list(folder)) != ["record"] or read_file(reader, path) != data:
                    wrong.add("a file that was written is not seen at once")
            with suppress(InterruptedError), writer.create(path) as sink:
                sink.write(memoryview(b"half"))
                raise InterruptedError
            if read_file(reader, path) != data:
                wrong.add("an interrupted write has replaced a file")
            # before the directory may go, see `no_new_folders`
            status = os.statvfs(writer.uri) if is_local(writer.uri) else None
        finally:
            writer.delete(folder)
        if list(reader.list(folder)):
            wrong.add("a file that was deleted is still listed")
    except CorruptFileError:
        wrong.add("a file that was written is not seen at once")
    except (CheckpointError, ValueError) as error:
        return Finding("storage", str(error), "PROBLEM")  # says what to do
    if wrong:
        return problem("storage", f"{writer.uri}: {'; '.join(sorted(wrong))}", "take one that is consistent")
    text = f"{writer.uri}: writes are atomic, and seen at once"
    advice = []
    if status:
        free = status.f_bavail * status.f_frsize
        text += f"; {size_text(free)} free"
        if free < max(needed_bytes or 0, LEAST_FREE_BYTES):
            advice.append("make room for a save of all tables, or name another directory")
    if missing:
        text += f"; it does not exist yet, and would be on what is mounted at {mount_of(Path(writer.uri))[0]}"
    if len(missing) > 1:  # to start a run makes its own folder; above it, a mount may be missing
        advice.append(f"look whether {missing[-1]} is misspelt, or not mounted")
    return warning("storage", text, "; ".join(advice)) if advice else Finding("storage", text)


@contextmanager
def no_new_folders(uri: str | None) -> Iterator[None]:
    """Remove at the end of the block what of a local directory did not exist before, unless it is used.

    Only where all nodes are done: one that still writes there would take its removal for a fault.
    """
    missing = [] if uri is None else _missing_folders(uri)
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # not made, or no more empty
                folder.rmdir()


def mount_of(path: Path) -> tuple[str, str]:
    """Mount point and kind of the file system of a path, which need not exist."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(reversed(above), key=lambda mount: len(mount[0]))  # a later mount covers an earlier one


def _missing_folders(uri: str) -> list[Path]:
    """Folders of a local directory that do not exist, the innermost first."""
    if not is_local(uri):
        return []
    path = Path(open_storage(uri).uri)
    return [folder for folder in (path, *path.parents) if not os.access(folder, os.F_OK)]
