"""Files on a local disk are written atomically and durably, and named in every error."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.checkpoint.storage import local as direct
from cpr.checkpoint.storage.base import open_storage
from cpr.checkpoint.storage.local import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    TEMPORARY_SUFFIX,
    BlockPool,
    FileWriter,
    LocalStorage,
)
from cpr.errors import CheckpointError, CorruptFileError

REPO = Path(__file__).parents[4]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(direct, "_pool", BlockPool())


@pytest.fixture
def no_direct_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT, but only after it has made the file, as some do."""
    really_open = os.open

    def refuse(path, flags, mode=0o777):
        file = really_open(path, flags, mode)
        if flags & os.O_DIRECT:
            os.close(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return file

    monkeypatch.setattr(os, "open", refuse)


def write(storage: LocalStorage, path: str, data: bytes) -> None:
    with storage.create(path) as sink:
        sink.write(memoryview(data))


def read(storage: LocalStorage, path: str) -> bytes:
    data = bytearray(storage.size(path))
    storage.read_into(path, 0, memoryview(data))
    return bytes(data)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 20_000), max_size=8), end=st.sampled_from([0, 4096, 8192, 1]))
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("refused", [False, True])
def test_pieces_of_any_size(tmp_path_factory, request, refused, sizes, end):
    if refused:
        request.getfixturevalue("no_direct_writing")
    storage = LocalStorage(tmp_path_factory.mktemp("pieces"))
    pieces = [os.urandom(size) for size in (*sizes, end)]
    with storage.create("file") as sink:
        for piece in pieces:
            sink.write(memoryview(piece))
    assert read(storage, "file") == b"".join(pieces)


def test_whole_blocks_go_past_the_page_cache(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    really_write, direct_bytes = os.write, []

    def watch(file: int, data: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            direct_bytes.append(len(data))
        return really_write(file, data)

    monkeypatch.setattr(os, "write", watch)
    probe = Path(storage.uri).parent / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writing")
    write(storage, "file", bytes(2 * BLOCK_BYTES + 4096 + 5))
    assert direct_bytes == [BLOCK_BYTES, BLOCK_BYTES, 4096]


def test_more_files_at_once_than_blocks(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    pool = BlockPool()
    monkeypatch.setattr(direct, "_pool", pool)
    everybody = threading.Barrier(MAX_BLOCKS + 2)
    data = [os.urandom(BLOCK_BYTES + 100) for _ in range(MAX_BLOCKS + 2)]

    def work(i: int) -> None:
        with storage.create(f"file-{i}") as sink:
            everybody.wait(30)
            sink.write(memoryview(data[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [read(storage, f"file-{i}") for i in range(len(data))] == data
    blocks = [pool.take() for _ in range(MAX_BLOCKS)]
    assert None not in blocks, "a block was lost"
    assert pool.take() is None


def test_durable_before_it_appears(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    events = []
    really_sync, really_replace = os.fsync, Path.replace

    def sync(file: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{file}').readlink().name.split('.')[0]}")
        really_sync(file)

    def replace(source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        really_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    write(storage, "saves/one/file", b"data")
    top = Path(storage.uri).parent.name.split(".")[0]
    folders = [f"sync {top}", "sync checkpoints", "sync saves"]
    assert events == [*folders, "sync file", "rename file", "sync one"]


def test_an_error_of_the_callers_own_files_keeps_its_name(storage: LocalStorage):
    with pytest.raises(FileNotFoundError), storage.create("file"):
        Path("/nowhere/at/all").read_bytes()


def test_delete(storage: LocalStorage, tmp_path: Path):
    write(storage, "saves/1/table/file", b"")
    write(storage, "saves/2/file", b"")
    for name in ("1/file", "2/file", "2/other"):
        (tmp_path / f"checkpoints/saves/{name}.1-a{TEMPORARY_SUFFIX}").write_bytes(b"of a dead writer")
    storage.delete("saves/1")
    storage.delete("saves/1")
    storage.delete("saves/2/file")
    storage.delete("saves/2/file")
    assert list(storage.list("saves")) == ["2"]
    assert list(storage.list("saves/2/other")) == []
    assert files_in(tmp_path) == [f"checkpoints/saves/2/other.1-a{TEMPORARY_SUFFIX}"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "saves/../../other", "saves//a", "."])
def test_paths_stay_inside(storage: LocalStorage, path: str):
    with pytest.raises(ValueError, match="not a path inside"):
        storage.delete(path)


def test_a_folder_in_the_place_of_a_file(storage: LocalStorage):
    write(storage, "saves/file", b"")
    with pytest.raises(CheckpointError, match="a folder stands where a file is needed"):
        write(storage, "saves", b"")
    with pytest.raises(CheckpointError, match="a file stands where a folder is needed"):
        write(storage, "saves/file/other", b"")


def test_a_failing_disk(storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(storage, "file", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match=r"file failed: Input/output error.*device is failing"):
            write(storage, "file", b"new")
    assert files_in(tmp_path) == ["checkpoints/file"]
    assert read(storage, "file") == b"old"


really_close = os.close


def closing_fails(file: int) -> None:
    """Closes and says that it could not, as a network file system does whose server has no room left."""
    really_close(file)
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_disk_that_is_full_when_the_file_is_closed(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pool = BlockPool()
    monkeypatch.setattr(direct, "_pool", pool)
    (tmp_path / "checkpoints").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closing_fails)
        for _ in range(MAX_BLOCKS + 1):
            with pytest.raises(CheckpointError, match=r"file failed: Disk quota exceeded.*free some space"):
                write(storage, "file", b"data")
    assert files_in(tmp_path) == []
    blocks = [pool.take() for _ in range(MAX_BLOCKS + 1)]
    assert blocks[0] is not None, "the block came back"
    assert len({id(block) for block in blocks}) == MAX_BLOCKS + 1, "and only once each time"


def test_the_first_error_is_raised_if_closing_fails_too(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "close", closing_fails)
    with pytest.raises(ValueError, match="the first"), storage.create("file"):
        raise ValueError("the first")
    assert files_in(tmp_path) == []


def test_a_file_descriptor_is_closed_once_even_when_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A second time would close whatever file got its number meanwhile."""
    closed = []
    writer = FileWriter(tmp_path / "file", "file")

    def close(file: int) -> None:
        closed.append(file)
        closing_fails(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(OSError, match="Disk quota exceeded"):
            writer.close()
        writer.close()
    assert len(closed) == 1


def test_a_bad_sector_is_a_corrupt_file(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch):
    """So that a reader falls back to an older state."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(storage, "file", b"data")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CorruptFileError, match=r"reading .*/file failed: Input/output error.*device is failing"
    ):
        read(storage, "file")


def test_the_folder_is_removed_under_a_writer(storage: LocalStorage):
    with (  # noqa: PT012
        pytest.raises(CheckpointError, match=r"saves/1/file failed: No such file.*the folder was removed"),
        storage.create("saves/1/file") as sink,
    ):
        sink.write(memoryview(b"data"))
        storage.delete("saves")


def test_open_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my runs"
    for uri in ("my runs", str(folder), folder.as_uri()):
        storage = open_storage(uri)
        assert isinstance(storage, LocalStorage)
        assert storage.uri == str(folder)


@pytest.mark.parametrize(("cores", "workers", "readers"), [(2, 2, 1), (2, 4, 1), (6, 2, 3), (64, 8, 4)])
def test_a_load_reads_with_the_cores_of_its_worker(monkeypatch, tmp_path, cores, workers, readers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    assert LocalStorage(tmp_path).readers == readers
