"""Reading ahead: what is expected is fetched meanwhile, in bounds, and nothing else changes."""

import gc
import time

import pytest

from data.cache import CacheConfig, CachedSource
from data.cache.ahead import AHEAD
from tests.data.cache.sources import READS, CountingSource


def expect(cache, inner, which):
    for part, group in which:
        cache.expect(inner.manifest.parts[part], group)


def read(cache, inner, one):
    return cache.read(inner.manifest.parts[one[0]], one[1])


def wait_for(condition):
    deadline_s = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    assert condition()


def wait_until_ready(cache, count):
    wait_for(lambda: sum(future.done() for future in cache._ahead._futures.values()) == count)


@pytest.mark.parametrize("limits", [{}, {"disk": 0, "in_memory": 0}])
def test_announced_row_groups_are_fetched_once_before_they_are_read(open_cache, dataset, limits):
    cache, inner = open_cache(**limits)
    expect(cache, inner, READS[:3])
    expect(cache, inner, READS[:3])
    wait_until_ready(cache, 3)
    plain = CountingSource(dataset)
    for one in READS[:3]:
        assert read(cache, inner, one) == read(plain, plain, one)
    assert inner.reads == READS[:3]


def test_read_ahead_is_bounded(open_cache):
    cache, inner = open_cache()
    inner.gate.clear()
    expect(cache, inner, READS)
    inner.gate.set()
    wait_until_ready(cache, AHEAD)
    assert inner.reads == READS[:AHEAD]
    read(cache, inner, READS[0])
    expect(cache, inner, READS[1 : AHEAD + 1])
    wait_until_ready(cache, AHEAD)
    assert inner.reads == READS[: AHEAD + 1]


def test_unread_row_groups_make_room(open_cache):
    cache, inner = open_cache()
    expect(cache, inner, READS[:AHEAD])
    wait_until_ready(cache, AHEAD)
    expect(cache, inner, READS[AHEAD:])
    wait_for(lambda: inner.reads == READS)
    assert len(cache._ahead._futures) <= AHEAD


def test_cached_row_groups_are_not_fetched_ahead(open_cache):
    before, inner_before = open_cache()
    for one in READS[:2]:
        read(before, inner_before, one)
    before._writer.submit(lambda: None).result(10)
    cache, inner = open_cache()
    expect(cache, inner, READS[:3])
    wait_until_ready(cache, 1)
    assert inner.reads == READS[2:3]
    assert read(cache, inner, READS[0]).num_rows == 400


def test_error_of_a_fetch_is_raised_at_the_read_with_the_file_name(open_cache, dataset):
    cache, inner = open_cache()
    name = inner.manifest.parts[1].path
    file, away = dataset / name, dataset / "away"
    file.rename(away)
    expect(cache, inner, READS[1:4])
    wait_until_ready(cache, 3)
    assert read(cache, inner, READS[1]).num_rows == 300
    with pytest.raises(FileNotFoundError, match=name):
        read(cache, inner, READS[2])
    assert read(cache, inner, READS[3]).num_rows == 200
    away.rename(file)
    assert read(cache, inner, READS[2]).num_rows == 500


def test_row_group_that_another_worker_fetches_is_not_fetched_again(open_cache):
    (one, inner_one), (two, inner_two) = open_cache(), open_cache()
    inner_one.gate.clear()
    expect(one, inner_one, READS[:1])
    wait_for(lambda: inner_one.reads)
    expect(two, inner_two, READS[:2])
    wait_until_ready(two, 2)
    assert inner_two.reads == READS[1:2], "the one that is taken must not hold up the other"
    inner_one.gate.set()
    assert read(two, inner_two, READS[0]) == read(one, inner_one, READS[0])
    assert inner_two.reads == READS[1:2]


def test_closing_does_not_wait_for_stuck_storage(open_cache, monkeypatch):
    monkeypatch.setattr("data.cache.ahead.CLOSE_S", 0.05)
    cache, inner = open_cache()
    inner.gate.clear()
    expect(cache, inner, READS[:3])
    wait_for(lambda: inner.reads)
    cache.close()
    assert not inner.gate.is_set()
    inner.gate.set()
    cache._ahead._background._shared.thread.join(10)
    expect(cache, inner, READS[3:])
    assert inner.reads == READS[:1]
    assert not cache._ahead._background._shared.thread.is_alive()


def test_dropped_cache_ends_its_thread_and_empties_its_memory(dataset, tmp_path, memory):
    config = CacheConfig(
        folder=tmp_path / "disk", disk_limit_bytes=0, memory_limit_bytes=10**8, memory_folder=memory
    )
    inner = CountingSource(dataset)
    cache = CachedSource(inner, config)
    expect(cache, inner, READS[:3])
    wait_until_ready(cache, 3)
    thread = cache._ahead._background._shared.thread
    cache._writer.submit(lambda: None).result(10)
    assert list(memory.rglob("*.arrow"))
    del cache
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert list(memory.iterdir()) == []
