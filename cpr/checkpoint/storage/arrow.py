"""Storage in an object store, or anywhere else that pyarrow has a file system for.

On object stores a file appears when its upload ends. pyarrow cannot abort an upload: dropping the stream
completes it. So small files (a manifest, an owner's record) are gathered first and sent when they are
complete, and a large one that fails is completed and deleted at once; files of a save count only once its
manifest exists. An upload whose process or network died stays invisible; a lifecycle rule of the bucket
(`AbortIncompleteMultipartUpload`) removes what the store keeps of such an upload.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import pyarrow
from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileSelector,
    FileSystem,
    FileType,
    S3FileSystem,
    resolve_s3_region,
)

from cpr.checkpoint.storage.explain import check_path, cut_short, explained
from cpr.checkpoint.storage.local import TEMPORARY_SUFFIX

WHOLE_BYTES: Final = 8 * 2**20
"""A file up to this size is gathered in memory and uploaded in one request."""
IN_FLIGHT_BYTES: Final = 64 * 2**20
"""Most bytes of one file in flight; its parts are sent at the same time."""

CONNECT_TIMEOUT_S: Final = 5.0
SILENCE_TIMEOUT_S: Final = 20.0
"""A request without any progress for this long is tried again."""
MAX_ATTEMPTS: Final = 4
GCS_RETRY_S: Final = 30
"""How long requests to Google's store are tried again; the library's default is 15 minutes."""
ANSWER_TIMEOUT_S: Final = 100.0
"""Longest wait for a store to open, or for one answer about files; S3 requests time out before that."""

_S3_OPTIONS: Final = frozenset({"region", "scheme", "endpoint_override", "tls_ca_file_path"})
_OBJECT_STORES: Final = frozenset({"s3", "gcs", "abfs"})


class ArrowSink:
    """One file that is being uploaded."""

    def __init__(self, system: FileSystem, path: str, name: str) -> None:
        self._system = system
        self._path = path
        self._name = name
        self._gathered = bytearray()
        self._stream: pyarrow.NativeFile | None = None
        self._in_flight = 0

    def write(self, data: memoryview) -> None:
        """See `Sink.write`."""
        if not data.nbytes:
            return
        if self._stream is None:
            self._gathered += data
            if len(self._gathered) <= WHOLE_BYTES:
                return
            data, self._gathered = memoryview(self._gathered), bytearray()
        with explained("writing", self._name):
            self._send(data)

    def finish(self) -> None:
        """Send the rest; afterwards the file is visible."""
        self._send(memoryview(self._gathered))
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def abandon(self) -> None:
        """Delete what was sent, as far as the store still answers."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
                self._system.delete_file(self._path)

    def _send(self, data: memoryview) -> None:
        if self._stream is None:
            self._stream = self._system.open_output_stream(self._path)
        data = memoryview(data).cast("B")
        for begin in range(0, len(data), WHOLE_BYTES):
            piece = data[begin : begin + WHOLE_BYTES]
            if self._in_flight + len(piece) > IN_FLIGHT_BYTES:
                self._stream.flush()  # waits for what is in flight
                self._in_flight = 0
            self._stream.write(piece)
            self._in_flight += len(piece)


class ArrowStorage:
    """A prefix of an object store, or a folder of a distributed file system.

    Args:
        uri: as pyarrow reads it. For S3 `s3://bucket/prefix`, if need be with `region`, `endpoint_override`,
            `scheme` and `tls_ca_file_path` as its query; credentials come from where the AWS tools look.

    Raises:
        ValueError: no file system for this URI, or an unknown option in it.
        CheckpointError: the store cannot be reached.
    """

    readers = 4

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        host = parts.netloc.rpartition("@")[2]  # the credentials before `@` stay out of messages
        self.uri = f"{parts.scheme}://{host}{parts.path}".rstrip("/")
        if parts.scheme in {"s3", "gs", "gcs"} and not host:
            raise ValueError(f"{parts.scheme}:// names no bucket: write {parts.scheme}://BUCKET/PREFIX")
        with explained("opening", self.uri):
            try:
                if parts.scheme == "s3":
                    self._system = _answer(lambda: _open_s3(uri))
                    root = f"{host}{unquote(parts.path)}"
                else:
                    self._system, root = _answer(lambda: FileSystem.from_uri(_patient(uri)))
            except pyarrow.ArrowInvalid as error:
                raise ValueError(f"{self.uri} cannot be opened: {error}") from error
        self._root = root.rstrip("/")
        self._whole_uploads = self._system.type_name in _OBJECT_STORES

    @contextmanager
    def create(self, path: str) -> Iterator[ArrowSink]:
        """See `Storage.create`."""
        name, target = self._name(path), self._locate(path)
        temporary = target if self._whole_uploads else f"{target}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        sink = ArrowSink(self._system, temporary, name)
        try:
            if not self._whole_uploads:
                with explained("writing", name):
                    self._system.create_dir(target.rpartition("/")[0])
            yield sink
            with explained("writing", name):
                sink.finish()
                if not self._whole_uploads:
                    self._system.move(temporary, target)
        except BaseException:
            sink.abandon()
            raise

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Storage.read_into`."""
        name = self._name(path)
        with explained("reading", name), self._system.open_input_file(self._locate(path)) as file:
            if file.size() < offset + buffer.nbytes:
                raise cut_short(name, offset + buffer.nbytes, file.size())
            file.seek(offset)
            count = file.readinto(buffer)
            if count < buffer.nbytes:  # the file was replaced by a shorter one since `size`
                raise cut_short(name, offset + buffer.nbytes, offset + count)

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        with explained("reading", self._name(path)):
            info = _answer(lambda: self._system.get_file_info(self._locate(path)))
            if info.type != FileType.File:
                raise FileNotFoundError(path)
            return int(info.size)

    def list(self, folder: str = "") -> Iterator[str]:
        """See `Storage.list`."""
        with explained("listing", self._name(folder)):
            selector = FileSelector(self._locate(folder), allow_not_found=True)
            entries = _answer(lambda: self._system.get_file_info(selector))
        names = (entry.base_name for entry in entries)
        yield from sorted(name for name in names if not name.endswith(TEMPORARY_SUFFIX))

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        where = self._locate(path)
        with explained("deleting", self._name(path)), suppress(FileNotFoundError):
            kind = self._system.get_file_info(where).type
            if kind == FileType.Directory:
                self._system.delete_dir(where)
            elif kind == FileType.File:
                self._system.delete_file(where)

    def _locate(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}".rstrip("/")

    def _name(self, path: str) -> str:
        return f"{self.uri}/{path}".rstrip("/")


def _answer(ask: Callable[[], Any]) -> Any:
    """Run a request with a time limit, as pyarrow's libraries may wait for many minutes or for ever.

    Raises:
        TimeoutError: no answer within `ANSWER_TIMEOUT_S`; the request continues in its own thread.
    """
    request: Future[Any] = Future()

    def run() -> None:
        try:
            request.set_result(ask())
        except BaseException as error:
            request.set_exception(error)

    thread = threading.Thread(target=run, name="storage-request", daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_S)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {ANSWER_TIMEOUT_S:g} s")
    return request.result()


def _patient(uri: str) -> str:
    """The URI with a limit to retries if it names Google's store and has no limit of its own."""
    parts = urlsplit(uri)
    if parts.scheme not in {"gs", "gcs"} or "retry_limit_seconds" in parts.query:
        return uri
    query = f"{parts.query}&" if parts.query else ""
    return urlunsplit(parts._replace(query=f"{query}retry_limit_seconds={GCS_RETRY_S}"))


def _open_s3(uri: str) -> S3FileSystem:
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if unknown := options.keys() - _S3_OPTIONS:
        possible = ", ".join(sorted(_S3_OPTIONS))
        raise ValueError(f"an S3 URI has no option {', '.join(sorted(unknown))}; possible are {possible}")
    if parts.username:
        options |= {"access_key": unquote(parts.username), "secret_key": unquote(parts.password or "")}
    if "region" not in options and "endpoint_override" not in options:
        options["region"] = resolve_s3_region(parts.netloc.rpartition("@")[2])
    return S3FileSystem(
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=SILENCE_TIMEOUT_S,
        allow_delayed_open=True,  # a small file is one request
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
        **options,
    )
