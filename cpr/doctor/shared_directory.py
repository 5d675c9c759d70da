"""Check that all nodes see the same checkpoint directory."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cpr.checkpoint.storage.base import Storage, is_local, open_storage, read_file
from cpr.doctor.finding import Finding, problem
from cpr.doctor.meeting import Meeting
from cpr.errors import CheckpointError


def check_shared_directory(meeting: Meeting, uri: str | None) -> Finding:
    """Check that this node can read what every other node has just written.

    Args:
        meeting: the nodes; each takes part, also without a directory.
        uri: the checkpoint directory as this node names it; None: not given.

    Raises:
        RendezvousError: a node has ended.
    """
    # one folder for all, so that the survivors delete the files of a node that ends meanwhile
    folder, *_ = meeting.gather("name of a folder", f"doctor-{secrets.token_hex(4)}")
    name, content = "same directory", secrets.token_hex(16)
    with _written(uri, f"{folder}/{meeting.rank}", content) as (storage, trouble):
        nodes = meeting.gather("file in the directory", {"content": content, "trouble": trouble})
        unseen = [
            meeting.name(rank)
            for rank in meeting.others
            if storage is not None and not _is_seen(storage, f"{folder}/{rank}", nodes[rank]["content"])
        ]
        meeting.gather("reading of the directory", None)  # before anything is deleted
    others = [(meeting.name(rank), nodes[rank]["trouble"]) for rank in meeting.others]
    if storage is None or any(reason for _, reason in others):  # each reason says what to do
        told = [trouble] if trouble else [f"{node}: {reason}" for node, reason in others if reason]
        return Finding(name, "; ".join(told), "PROBLEM")
    if not unseen:
        return Finding(name, f"{storage.uri}: this node sees what all others write")
    advice = (
        "mount one shared file system (NFS, Lustre) there on all nodes, or name an object store (s3://..): a "
        "directory of a node's own disk is another one on each node"
        if is_local(storage.uri)
        else "name the same bucket and prefix on all nodes, in a store whose files are seen at once"
    )
    return problem(name, f"{storage.uri} is not what {', '.join(unseen)} writes to", advice)


@contextmanager
def _written(uri: str | None, path: str, content: str) -> Iterator[tuple[Storage | None, str]]:
    """Write a file, and delete its folder at the end; gives its storage, or None and why not."""
    storage = None
    try:
        try:
            if uri is None:
                raise ValueError("no --checkpoint. What to do: give all nodes the same one")
            storage = open_storage(uri)
            with storage.create(path) as sink:
                sink.write(memoryview(content.encode()))
        except (CheckpointError, ValueError) as error:
            yield None, str(error)
        else:
            yield storage, ""
    finally:
        if storage is not None:
            with suppress(CheckpointError):
                storage.delete(path.split("/", maxsplit=1)[0])


def _is_seen(storage: Storage, path: str, content: str) -> bool:
    try:
        return read_file(storage, path) == content.encode()
    except CheckpointError:
        return False
