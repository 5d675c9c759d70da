"""The cache gives what the source gives, whatever happens to its files, its disk or its other users."""

import contextlib
import logging
import os
import random
import signal
import threading
import time

import pyarrow as pa
import pytest

import data.cache.source
from data.cache import CacheConfig, CachedSource
from data.cache.level import SUFFIX
from data.cache.lock import FileLock
from data.loader import DataLoader, LoaderConfig
from tests import forks
from tests.data.cache.sources import READS, CountingSource


def read_all(cache, inner, which=READS):
    return [cache.read(inner.manifest.parts[part], group) for part, group in which]


def settle(cache):
    """Wait until everything read so far is stored."""
    cache._writer.submit(lambda: None).result(10)


def read_settled(cache, inner, which=READS):
    tables = []
    for one in which:
        tables += read_all(cache, inner, [one])
        settle(cache)
    return tables


def entries(folder):
    return sorted(folder.rglob(f"*{SUFFIX}"))


def size_of(folder):
    sizes = []
    for path in entries(folder):
        with contextlib.suppress(FileNotFoundError):  # evicted while we look
            sizes.append(path.stat().st_size)
    return sum(sizes)


def test_each_row_group_is_read_from_the_data_set_once(open_cache, dataset):
    cache, inner = open_cache()
    first = read_settled(cache, inner)
    assert inner.reads == READS
    second = read_all(cache, inner)
    assert inner.reads == READS
    plain = read_all(CountingSource(dataset)._inner, inner)
    assert first == second == plain


def test_workers_share_the_memory_level(open_cache, tmp_path, memory):
    one, inner_one = open_cache()
    read_settled(one, inner_one)
    assert len(entries(tmp_path / "disk")) == len(READS)
    two, inner_two = open_cache()
    read_settled(two, inner_two)
    assert len(entries(memory)) == len(READS), "what was found on disk was not brought into memory"
    for path in entries(tmp_path / "disk"):
        path.unlink()
    read_settled(one, inner_one)
    assert (inner_one.reads, inner_two.reads) == (READS, [])
    two.close()
    assert len(entries(memory)) == len(READS)
    one.close()
    assert list(memory.iterdir()) == []


def test_later_runs_reuse_the_disk_level(open_cache):
    one, inner = open_cache()
    tables = read_settled(one, inner)
    one.close()
    later, inner_later = open_cache()
    assert read_settled(later, inner_later) == tables
    assert inner_later.reads == []


@pytest.mark.parametrize(("disk", "in_memory"), [(10**8, 0), (0, 10**8)])
def test_either_level_alone_is_enough(open_cache, disk, in_memory):
    cache, inner = open_cache(disk=disk, in_memory=in_memory)
    read_settled(cache, inner)
    read_all(cache, inner)
    assert inner.reads == READS


def test_without_levels_every_read_goes_to_the_data_set(open_cache):
    cache, inner = open_cache(disk=0, in_memory=0)
    read_settled(cache, inner)
    read_all(cache, inner)
    assert inner.reads == READS * 2


def test_the_loader_gives_the_same_batches_from_the_cache(open_cache, dataset):
    config = LoaderConfig(batch_size=16, window_batches=4)
    plain = [batch.sparse.values() for batch in DataLoader(str(dataset), config)]
    cache, inner = open_cache()
    read_settled(cache, inner)
    loader = DataLoader(str(dataset), config, source=cache)
    cached = [batch.sparse.values() for batch in loader]
    assert inner.reads == READS
    assert all(one.equal(other) for one, other in zip(plain, cached, strict=True))


def test_the_table_in_memory_is_a_view_of_the_file(open_cache):
    cache, inner = open_cache()
    read_settled(cache, inner)
    before = pa.total_allocated_bytes()
    tables = read_all(cache, inner)
    assert pa.total_allocated_bytes() - before < 0.1 * sum(table.nbytes for table in tables)


@pytest.mark.parametrize("level", ["shm", "disk"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage"])
def test_damaged_files_are_read_again_and_replaced(open_cache, tmp_path, dataset, caplog, level, damage):
    one, inner = open_cache(**({"disk": 0} if level == "shm" else {"in_memory": 0}))
    read_settled(one, inner)
    good = {path: path.read_bytes() for path in entries(tmp_path / level)}
    for path, content in good.items():
        middle = len(content) // 2
        damaged = {
            "flip": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
            "cut": content[:-8],
            "empty": b"",
            "garbage": os.urandom(middle),
        }[damage]
        path.unlink()  # who has mapped the old file keeps it
        path.write_bytes(damaged)
    other, inner_other = open_cache(**({"disk": 0} if level == "shm" else {"in_memory": 0}))
    with caplog.at_level(logging.WARNING):
        tables = read_settled(other, inner_other)
    assert inner_other.reads == READS
    assert tables == read_all(CountingSource(dataset)._inner, inner)
    assert {path: path.read_bytes() for path in entries(tmp_path / level)} == good
    assert len([r for r in caplog.records if "damaged" in r.message]) == len(READS)


@pytest.mark.parametrize("level", ["shm", "disk"])
@pytest.mark.parametrize("left", [0, 200])
def test_entry_truncated_after_a_read_is_read_again(open_cache, tmp_path, caplog, level, left):
    cache, inner = open_cache(**({"disk": 0} if level == "shm" else {"in_memory": 0}))
    expected = read_settled(cache, inner)
    read_settled(cache, inner)  # from the files, which are mapped no more afterwards
    assert inner.reads == READS
    for path in entries(tmp_path / level):
        os.truncate(path, left)
    with caplog.at_level(logging.WARNING):
        assert read_settled(cache, inner) == expected
    assert inner.reads == 2 * READS
    assert len([r for r in caplog.records if "damaged" in r.message]) == len(READS)


@pytest.mark.parametrize("level", ["shm", "disk"])
def test_limits_hold_and_entries_that_fit_stay_over_epochs(open_cache, tmp_path, caplog, level):
    whole, inner = open_cache()
    read_settled(whole, inner)
    sizes = [path.stat().st_size for path in entries(tmp_path / "disk")]
    whole.close()
    for path in entries(tmp_path):
        path.unlink()
    limit = sum(sizes) - 1
    cache, inner = open_cache(
        **{"disk": limit, "in_memory": 0} if level == "disk" else {"disk": 0, "in_memory": limit}
    )
    for _ in range(3):
        read_settled(cache, inner)
        assert 0 < size_of(tmp_path / level) <= limit
    missed_later = inner.reads[len(READS) :]
    assert len(missed_later) == 2 * len(set(missed_later)), "the same row groups are missed in every epoch"
    assert len(set(missed_later)) < len(READS) / 2


def test_entries_of_earlier_runs_are_evicted_least_recently_used_first(open_cache, tmp_path):
    before, inner = open_cache(in_memory=0)
    read_settled(before, inner, READS[:3])
    before.close()
    old = {path: path.stat().st_size for path in entries(tmp_path / "disk")}
    long_ago = time.time() - 1000
    for age, path in enumerate(old):
        os.utime(path, (long_ago + age, long_ago + age))
    limit = sum(old.values())
    now, inner = open_cache(in_memory=0, disk=limit)
    read_settled(now, inner, READS[3:4])
    left = set(entries(tmp_path / "disk"))
    assert size_of(tmp_path / "disk") <= limit
    gone = [path for path in old if path not in left]
    assert gone == list(old)[: len(gone)]
    assert len(gone) in (1, 2)


def test_entries_of_this_run_are_not_evicted(open_cache, tmp_path):
    before, inner = open_cache(in_memory=0)
    read_settled(before, inner, READS[:3])
    before.close()
    long_ago = time.time() - 1000
    oldest = tmp_path / "disk" / f"{before._key(inner.manifest.parts[0], 0)}{SUFFIX}"
    for path in entries(tmp_path / "disk"):
        os.utime(path, (long_ago - (path == oldest), long_ago - (path == oldest)))
    now, inner = open_cache(in_memory=0, disk=size_of(tmp_path / "disk"))
    read_settled(now, inner, [READS[0], READS[3]])
    assert inner.reads == [READS[3]]
    assert oldest.exists()
    assert len(entries(tmp_path / "disk")) < 4


def test_two_workers_fetch_the_same_row_group_once(open_cache):
    one, inner_one = open_cache()
    two, inner_two = open_cache()
    inner_one.gate.clear()
    results = {}
    threads = [
        threading.Thread(target=lambda n=n, c=c, i=i: results.update({n: read_all(c, i, READS[:1])}))
        for n, c, i in [("one", one, inner_one), ("two", two, inner_two)]
    ]
    threads[0].start()
    while not inner_one.reads:
        time.sleep(0.001)
    threads[1].start()
    time.sleep(0.05)
    assert inner_two.reads == [], "the second worker did not wait for the first"
    inner_one.gate.set()
    for thread in threads:
        thread.join()
    assert results["one"] == results["two"]
    assert inner_two.reads == []


def test_failing_source_raises_and_releases_its_claim(open_cache):
    cache, inner = open_cache()
    part = inner.manifest.parts[0]

    class Failing(CountingSource):
        def read(self, part, row_group):
            raise OSError("the network is down")

    broken, _ = open_cache(inner=Failing(inner.folder))
    with pytest.raises(OSError, match="the network is down"):
        broken.read(part, 0)
    assert cache.read(part, 0).num_rows == 400


def test_a_cache_that_cannot_be_made_costs_one_warning(open_cache, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        cache, inner = open_cache(folder=tmp_path / "file" / "cache", in_memory=0)
        read_settled(cache, inner)
        read_settled(cache, inner)
    assert inner.reads == READS * 2
    assert len(caplog.records) == 1
    assert "cannot be made" in caplog.text


def test_a_full_disk_costs_one_warning(open_cache, tmp_path, caplog, no_file_longer_than):
    cache, inner = open_cache(in_memory=0)
    with no_file_longer_than(4096), caplog.at_level(logging.WARNING):
        tables = read_settled(cache, inner)
    assert [table.num_rows for table in tables] == [400, 300, 500, 200, 200]
    assert inner.reads == READS
    assert entries(tmp_path / "disk") == []
    assert not list((tmp_path / "disk").glob("*.tmp"))
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == len(caplog.records) == 1


def test_read_only_entry_is_used(open_cache, monkeypatch):
    cache, inner = open_cache(in_memory=0)
    read_settled(cache, inner)

    def refuse(*_, **__):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    other, inner_other = open_cache(in_memory=0)
    read_all(other, inner_other)
    assert inner_other.reads == []


@pytest.mark.parametrize("name", ["disk_limit_bytes", "memory_limit_bytes"])
@pytest.mark.parametrize("limit", [-1, "1", 0.5])
def test_invalid_limits_are_refused(tmp_path, name, limit):
    limits = {"disk_limit_bytes": 0, "memory_limit_bytes": 0, name: limit}
    with pytest.raises(ValueError, match=name):
        CacheConfig(folder=tmp_path, **limits)


def test_a_removed_lock_file_guards_nothing(tmp_path):
    path = tmp_path / "lock"
    first = FileLock.acquire(path)
    waited = []
    waiter = threading.Thread(target=lambda: waited.append(FileLock.acquire(path)))
    waiter.start()
    time.sleep(0.05)
    first.release(remove=True)
    waiter.join(10)
    assert FileLock.try_acquire(path) is None, "the waiter holds a file that is gone"
    waited[0].release()
    again = FileLock.try_acquire(path)
    assert again is not None
    again.release(remove=True)


def _config(folder, memory, **limits):
    limits = {"disk_limit_bytes": 10**8, "memory_limit_bytes": 10**8, **limits}
    return CacheConfig(folder=folder, memory_folder=memory, **limits)


def _fill_and_hang(folder, memory, dataset, holding):
    inner = CountingSource(dataset)
    inner.gate.clear()
    cache = CachedSource(inner, _config(folder, memory))
    threading.Thread(target=lambda: cache.read(inner.manifest.parts[0], 0), daemon=True).start()
    while not inner.reads:
        time.sleep(0.001)
    holding.set()
    time.sleep(60)


@pytest.mark.system
@pytest.mark.timeout(60)
def test_killed_fetching_worker_does_not_block_others(open_cache, tmp_path, memory, dataset):
    context = forks.context()
    holding = context.Event()
    filler = context.Process(target=_fill_and_hang, args=(tmp_path / "disk", memory, dataset, holding))
    filler.start()
    try:
        assert holding.wait(40)
        cache, inner = open_cache()
        part = inner.manifest.parts[0]
        result = []
        reader = threading.Thread(target=lambda: result.append(cache.read(part, 0)))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive(), "it should wait for the filler as long as that lives"
    finally:
        os.kill(filler.pid, signal.SIGKILL)
        filler.join()
    reader.join(10)
    assert result[0].num_rows == 400
    assert inner.reads == [(0, 0)]


def _read_in_random_order(seed, folder, memory, dataset, limit, failures):
    data.cache.source.QUIET_S = 0.0
    plain, inner = CountingSource(dataset), CountingSource(dataset)
    config = _config(folder, memory, disk_limit_bytes=limit, memory_limit_bytes=limit // 2)
    order = random.Random(seed)
    for _ in range(8):
        cache = CachedSource(inner, config)
        for one in order.sample(READS * 4, len(READS) * 4):
            if read_all(cache, inner, [one]) != read_all(plain, plain, [one]):
                failures.put(f"{one} differs")
        cache.close()
    failures.put(None)


@pytest.mark.system
@pytest.mark.timeout(120)
def test_many_workers_with_kills_never_read_a_wrong_row_group(tmp_path, memory, dataset):
    context = forks.context()
    failures = context.Queue()
    limit = 30_000  # of the 41 kB of all row groups
    arguments = (tmp_path / "disk", memory, dataset, limit, failures)
    workers = [
        context.Process(target=_read_in_random_order, args=(seed, *arguments), daemon=True)
        for seed in range(3)
    ]
    for worker in workers:
        worker.start()
    victim = workers.pop()
    while not entries(tmp_path):
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    largest = 0
    while any(worker.is_alive() for worker in workers):
        largest = max(largest, size_of(tmp_path / "disk"))
        time.sleep(0.01)
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = [failures.get(timeout=10) for _ in workers]
    assert found == [None] * 2
    assert 0 < largest <= limit
