"""Check that all nodes see the same checkpoint directory."""

import secrets
from contextlib import suppress
from typing import Final

from cpr.checkpoint.storage.base import Storage, is_local, open_storage, read_file
from cpr.doctor.finding import Finding, problem
from cpr.doctor.meeting import Meeting
from cpr.errors import CheckpointError

_NAME: Final = "same directory"


def check_shared_directory(meeting: Meeting, uri: str | None) -> Finding:
    """Check that this node sees at once what all others write, as ownership of the directory relies on it.

    Args:
        meeting: the nodes; each takes part, also without a directory.
        uri: the checkpoint directory as this node names it; None: not given.

    Raises:
        RendezvousError: a node has ended.
    """
    # one folder for all, so that the survivors delete the files of a node that ends meanwhile
    folder, *_ = meeting.gather("name of a folder", f"doctor-{secrets.token_hex(4)}")
    storage, trouble = _open(uri)
    try:
        return _check(meeting, storage, trouble, folder)
    finally:
        if storage is not None:
            with suppress(CheckpointError):
                storage.delete(folder)


def _check(meeting: Meeting, storage: Storage | None, trouble: str, folder: str) -> Finding:
    content = secrets.token_hex(16)
    trouble = trouble or _write(storage, f"{folder}/{meeting.rank}", content)
    nodes = meeting.gather("file in the directory", [content, trouble])
    unseen = [
        meeting.name(rank)
        for rank in meeting.others
        if not _is_seen(storage, f"{folder}/{rank}", nodes[rank][0])
    ]
    _names(storage, folder)  # from now on, a file system may keep the listing
    meeting.gather("listing of the directory", None)
    trouble = trouble or _write(storage, f"{folder}/{meeting.rank}-second", content)
    troubles = meeting.gather("second file in the directory", trouble)
    unlisted = {f"{rank}-second" for rank in meeting.others} - _names(storage, folder)
    meeting.gather("second listing of the directory", None)  # before anything is deleted
    others = [f"{meeting.name(rank)}: {troubles[rank]}" for rank in meeting.others if troubles[rank]]
    if storage is None or trouble or others:  # each says what to do
        return Finding(_NAME, trouble or "; ".join(others), "PROBLEM")
    if unseen:
        return problem(_NAME, f"{storage.uri} is not what {', '.join(unseen)} writes to", _advice(storage))
    if unlisted:
        text = f"{storage.uri}: what other nodes write is listed late, so that two runs could take it at once"
        return problem(
            _NAME, text, "mount it without cached attributes (NFS: actimeo=0), or take another one"
        )
    return Finding(_NAME, f"{storage.uri}: this node sees what all others write")


def _open(uri: str | None) -> tuple[Storage | None, str]:
    """Open the storage; None, and why not."""
    if uri is None:
        return None, "no --checkpoint. What to do: give all nodes the same one"
    try:
        return open_storage(uri), ""
    except (CheckpointError, ValueError) as error:
        return None, str(error)


def _write(storage: Storage | None, path: str, content: str) -> str:
    """Write a file; returns why that failed, or nothing."""
    assert storage is not None
    try:
        with storage.create(path) as sink:
            sink.write(memoryview(content.encode()))
    except CheckpointError as error:
        return str(error)
    return ""


def _is_seen(storage: Storage | None, path: str, content: str) -> bool:
    with suppress(CheckpointError):
        return storage is not None and read_file(storage, path) == content.encode()
    return False


def _names(storage: Storage | None, folder: str) -> set[str]:
    with suppress(CheckpointError):
        return set() if storage is None else set(storage.list(folder))
    return set()


def _advice(storage: Storage) -> str:
    if is_local(storage.uri):
        return (
            "mount one shared file system (NFS, Lustre) there on all nodes, or name an object store "
            "(s3://..): a directory of a node's own disk is another one on each node; or the nodes were "
            "given different directories: give all the same --checkpoint"
        )
    return "name the same bucket and prefix on all nodes, in a store whose files are seen at once"
