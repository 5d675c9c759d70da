"""Files in an object store: a real S3 server on loopback, one that dies or is silent, and pyarrow's mock."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow.fs import FileSelector, LocalFileSystem

from cpr.checkpoint.storage import arrow as remote
from cpr.checkpoint.storage.arrow import WHOLE_BYTES, ArrowStorage
from cpr.checkpoint.storage.base import Storage, open_storage
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import CheckpointError, CorruptFileError

REPO = Path(__file__).parents[4]
LARGE = 3 * WHOLE_BYTES + 12_345


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.system), "mock", "files", "local"])
def storage(request, tmp_path: Path) -> Storage:
    """An object store, pyarrow's mock, one whose unfinished files are visible (as in HDFS), a local disk."""
    if request.param == "local":
        return LocalStorage(tmp_path)
    if request.param != "s3":
        storage = ArrowStorage("mock:///folder")
        if request.param == "files":
            storage._system, storage._root = LocalFileSystem(), str(tmp_path)
        return storage
    name = request.node.name.replace("[", "-").replace("]", "")
    return open_storage(request.getfixturevalue("s3").uri(f"bucket/{name}"))


def write(storage: Storage, path: str, data: bytes, during: Callable[[], None] = lambda: None) -> None:
    with storage.create(path) as sink:
        sink.write(memoryview(data))
        during()


def read(storage: Storage, path: str) -> bytes:
    data = bytearray(storage.size(path))
    storage.read_into(path, 0, memoryview(data))
    return bytes(data)


def count_files(storage: Storage) -> int:
    """Number of all files, including those that `list` hides."""
    if isinstance(storage, LocalStorage):
        return sum(path.is_file() for path in Path(storage.uri).rglob("*"))
    everything = FileSelector(storage._root, recursive=True, allow_not_found=True)
    return sum(info.is_file for info in storage._system.get_file_info(everything))


@pytest.mark.parametrize("size", [0, 5, WHOLE_BYTES, LARGE])
def test_files_come_back(storage: Storage, size: int):
    data = os.urandom(size)
    with storage.create("saves/1/file") as sink:
        for begin, end in [(0, 3), (3, 3), (3, 1000), (1000, size)]:
            sink.write(memoryview(data)[begin:end])
    assert read(storage, "saves/1/file") == data
    part = bytearray(size // 2)
    storage.read_into("saves/1/file", size // 3, memoryview(part))
    assert part == data[size // 3 : size // 3 + size // 2]


def test_memory_that_is_written_may_be_reused_at_once(storage: Storage):
    buffer = bytearray(5_000_000)
    with storage.create("file") as sink:
        for value in range(1, 6):
            buffer[:] = bytes([value]) * len(buffer)
            sink.write(memoryview(buffer))
        buffer[:] = bytes(len(buffer))
    data = read(storage, "file")
    assert [data[i * len(buffer)] for i in range(5)] == [1, 2, 3, 4, 5]
    assert 0 not in data


def test_a_file_appears_at_its_end(storage: Storage):
    write(storage, "file", b"old")
    for data in (b"new", bytes(LARGE)):
        before = read(storage, "file")

        def check(before: bytes = before) -> None:
            assert read(storage, "file") == before
            assert list(storage.list()) == ["file"]

        write(storage, "file", data, during=check)
        assert read(storage, "file") == data
    assert list(storage.list()) == ["file"]
    assert count_files(storage) == 1


@pytest.mark.parametrize("size", [5, LARGE])
def test_an_error_of_the_writer_leaves_nothing(storage: Storage, size: int):
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        write(storage, "saves/1/file", bytes(size), during=fail)
    assert list(storage.list("saves/1")) == []
    assert count_files(storage) == 0
    with pytest.raises(CorruptFileError, match="saves/1/file is missing"):
        storage.size("saves/1/file")


def test_list_and_delete(storage: Storage):
    assert list(storage.list()) == []
    for name in ("saves/2/b", "saves/2/a", "saves/10/table/c"):
        write(storage, name, b"x")
    assert list(storage.list()) == ["saves"]
    assert list(storage.list("saves")) == ["10", "2"]
    assert list(storage.list("saves/2")) == ["a", "b"]
    assert list(storage.list("nothing/here")) == []
    for _ in range(2):
        storage.delete("saves/10")
        storage.delete("saves/2/a")
    assert list(storage.list("saves")) == ["2"]
    assert list(storage.list("saves/2")) == ["b"]


def test_missing_and_short_files(storage: Storage):
    for use in (lambda: storage.size("a/b"), lambda: storage.read_into("a/b", 0, memoryview(bytearray(1)))):
        with pytest.raises(CorruptFileError, match="/a/b is missing"):
            use()
    write(storage, "file", bytes(100))
    with pytest.raises(CorruptFileError, match=r"/file is cut short: it has 100 bytes.* 110 "):
        storage.read_into("file", 90, memoryview(bytearray(20)))


def test_bytes_in_flight_are_limited(s3, monkeypatch: pytest.MonkeyPatch):
    """pyarrow alone would take any amount into memory at once."""
    on_its_way, most = 0, 0
    limit = 3 * WHOLE_BYTES
    monkeypatch.setattr(remote, "IN_FLIGHT_BYTES", limit)

    class Counted:
        def __init__(self, stream: pyarrow.NativeFile) -> None:
            self.stream = stream

        def write(self, data: memoryview) -> None:
            nonlocal on_its_way, most
            on_its_way += len(data)
            most = max(most, on_its_way)
            self.stream.write(data)

        def flush(self) -> None:
            nonlocal on_its_way
            self.stream.flush()
            on_its_way = 0

        def close(self) -> None:
            self.stream.close()

    storage = ArrowStorage(s3.uri("bucket/in-flight"))
    system = storage._system

    class Watched:
        def open_output_stream(self, path: str) -> Counted:
            return Counted(system.open_output_stream(path))

    monkeypatch.setattr(storage, "_system", Watched())
    write(storage, "file", bytes(2 * limit))
    assert WHOLE_BYTES < most <= limit
    assert system.get_file_info("bucket/in-flight/file").size == 2 * limit


def test_a_bucket_that_is_not_there(s3):
    storage = open_storage(s3.uri("nowhere/prefix"))
    for size in (5, LARGE):
        with pytest.raises(
            CheckpointError, match=r"writing s3://nowhere/prefix/file failed.*create the bucket"
        ):
            write(storage, "file", bytes(size))


def test_bad_credentials(s3):
    storage = open_storage(s3.uri("bucket/credentials"))
    write(storage, "file", b"x")
    s3.request("POST", "/moto-api/reset-auth", "0")
    try:
        with pytest.raises(CheckpointError, match=r"/credentials/new failed.*check the access key"):
            write(storage, "new", b"x")
        with pytest.raises(CheckpointError, match=r"reading s3://bucket/credentials/file failed"):
            read(storage, "file")
    finally:
        s3.request("POST", "/moto-api/reset-auth", "inf")
    assert list(storage.list()) == ["file"]


def test_secrets_stay_out_of_messages(s3):
    storage = open_storage(s3.uri("bucket/quiet"))
    assert storage.uri == "s3://bucket/quiet"
    with pytest.raises(CorruptFileError) as error:
        storage.size("file")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://bucket/a?endpoint=b", "no option endpoint; possible are endpoint_override, region"),
        ("floppy://a/b", r"floppy://a/b cannot be opened: Unrecognized"),
        ("gs://bucket/a?endpoint=b", r"gs://bucket/a cannot be opened: Unexpected query parameter"),
        ("s3://", "s3:// names no bucket: write s3://BUCKET/PREFIX"),
        ("gs:///prefix", "gs:// names no bucket"),
    ],
)
def test_uris_that_cannot_be_opened(uri: str, message: str):
    with pytest.raises(ValueError, match=message):
        open_storage(uri)


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "SILENCE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(remote, "MAX_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        storage = open_storage(f"s3://key:secret@bucket/a?endpoint_override=127.0.0.1:{port}&scheme=http")
        with pytest.raises(
            CheckpointError, match=r"reading s3://bucket/a/file failed.*last 1 seconds.*store is up"
        ):
            storage.size("file")


def test_a_request_that_is_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """Google's library itself waits for two minutes where a store takes a connection and says nothing."""
    monkeypatch.setattr(remote, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        storage = open_storage(
            f"gs://anonymous@bucket/a?scheme=http&endpoint_override={where}&retry_limit_seconds=1"
        )
        with pytest.raises(
            CheckpointError, match=r"listing gs://bucket/a/saves failed: no answer in 0.5 s.*is up"
        ):
            next(storage.list("saves"))
        silent.accept()[0].close()
    for thread in threading.enumerate():
        if thread.name == "storage-request":
            thread.join()


def test_a_store_of_google_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GCS_RETRY_S", 1)
    storage = open_storage("gs://anonymous@bucket/a?scheme=http&endpoint_override=127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"connect to server\. What to do: check that the store is up"):
        storage.size("file")


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_store_that_pauses_and_then_dies(start_s3, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "MAX_ATTEMPTS", 2)
    server = start_s3()
    storage = open_storage(server.uri("bucket/a"))
    data = os.urandom(LARGE)

    def pause() -> None:
        server.process.send_signal(signal.SIGSTOP)
        threading.Timer(1.0, server.process.send_signal, [signal.SIGCONT]).start()

    write(storage, "slow", data, during=pause)
    assert read(storage, "slow") == data

    def kill() -> None:
        server.process.kill()
        server.process.wait()

    with pytest.raises(
        CheckpointError, match=r"writing s3://bucket/a/gone failed.*check that the store is up"
    ):
        write(storage, "gone", data, during=kill)
    with pytest.raises(
        CheckpointError, match=r"reading s3://bucket/a/slow failed.*check that the store is up"
    ):
        read(storage, "slow")
