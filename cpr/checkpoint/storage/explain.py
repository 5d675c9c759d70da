"""Turns errors of disks and object stores into messages with the file, the cause, and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cpr.errors import CheckpointError, CorruptFileError

_FULL: Final = "free some space, keep fewer checkpoints, or write to another place"
_REFUSED: Final = "make it writable for this user, or name another directory"
_BROKEN: Final = "the device is failing: look at the kernel's log and use another one"
_UNREACHABLE: Final = "check that the store is up and can be reached from here"
_GONE: Final = "the folder was removed, or the disk is no longer mounted; check that the directory is there"

_BY_ERRNO: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on file size (`ulimit -f`), or write to another file system",
    errno.EROFS: _REFUSED,
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EIO: _BROKEN,
    errno.EBADMSG: _BROKEN,
    errno.EUCLEAN: _BROKEN,
    errno.ESTALE: _GONE,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or name another directory",
    errno.EEXIST: "a file stands where a folder is needed: move it away, or name another directory",
    errno.EISDIR: "a folder stands where a file is needed: move it away, or name another directory",
    errno.EMFILE: "too many files are open: raise the limit (`ulimit -n`)",
}

_UNREADABLE: Final = frozenset(
    {errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""Read errors that mean a damaged file: a bad sector, a wrong checksum, or something that is no file."""

_BY_WORD: Final = {
    "NO_SUCH_BUCKET": "create the bucket, or correct its name in the URI",
    "ACCESS_DENIED": "let these credentials read, write and delete under this prefix",
    "INVALID_ACCESS_KEY": "check the access key (AWS_ACCESS_KEY_ID, or the profile)",
    "SIGNATURE": "check the secret key (AWS_SECRET_ACCESS_KEY) and this machine's clock",
    "NETWORK_CONNECTION": _UNREACHABLE,
    "no answer": _UNREACHABLE,
    "OAuth2": "give credentials (GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default "
    "login`), or write gs://anonymous@BUCKET/.. for a public bucket; and check that Google can be reached",
    "UNAVAILABLE": _UNREACHABLE,
    "DEADLINE_EXCEEDED": _UNREACHABLE,
}
"""Advice by words in the messages of pyarrow's object stores, whose errors carry no number."""


@contextmanager
def explained(doing: str, file: str) -> Iterator[None]:
    """Turn operating system errors of the block into checkpoint errors.

    Args:
        doing: what the block does, as in "writing".
        file: full name, for the message.

    Raises:
        CorruptFileError: `doing` is "reading", and the file is missing or the device cannot read it.
        CheckpointError: any other operating system error.
    """
    try:
        yield
    except OSError as error:
        if doing == "reading" and isinstance(error, FileNotFoundError):
            raise CorruptFileError(f"{file} is missing") from error
        kind = CorruptFileError if doing == "reading" and error.errno in _UNREADABLE else CheckpointError
        raise kind(_explain(doing, file, error)) from error


def cut_short(file: str, wanted: int, size: int) -> CorruptFileError:
    """The error for a file that is shorter than what was to be read from it."""
    return CorruptFileError(
        f"{file} is cut short: it has {size} bytes, and what is up to byte {wanted} was asked for"
    )


def check_path(path: str) -> str:
    """Return the path; raises ValueError if it is absolute or leads out of its storage."""
    if path and not all(part.strip(".") for part in path.split("/")):
        raise ValueError(f"{path!r} is not a path inside a storage: it must be relative, without . or ..")
    return path


def _explain(doing: str, file: str, error: OSError) -> str:
    cause = error.strerror or " ".join(str(error).split()).partition(" error_info=")[0]
    advice = _BY_ERRNO.get(error.errno or 0) or next(
        (text for word, text in _BY_WORD.items() if word in cause), "see the cause; the next save tries again"
    )
    return f"{doing} {file} failed: {cause}. What to do: {advice}"
