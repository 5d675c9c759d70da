"""A small data set, and caches of it."""

import pytest

from data.cache import CacheConfig, CachedSource
from tests.data.cache.sources import GROUPS, CountingSource


@pytest.fixture(autouse=True)
def _store_at_once(monkeypatch):
    """Without waiting for the start of the next fetch: most tests read one row group at a time."""
    monkeypatch.setattr("data.cache.source.QUIET_S", 0.0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, make_dataset):
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder, row_groups=GROUPS, kinds=("one", "bag"))
    return folder


@pytest.fixture
def memory(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def open_cache(tmp_path, memory, dataset):
    """Open a cache with a fresh counting source, as another worker or another run would."""
    opened = []

    def open_one(disk=10**8, in_memory=10**8, folder=tmp_path / "disk", inner=None):
        config = CacheConfig(
            folder=folder, disk_limit_bytes=disk, memory_limit_bytes=in_memory, memory_folder=memory
        )
        inner = inner or CountingSource(dataset)
        opened.append((CachedSource(inner, config), inner))
        return opened[-1]

    yield open_one
    for cache, inner in opened:
        inner.gate.set()
        cache.close()
