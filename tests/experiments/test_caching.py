"""The caching experiment and its slow storage."""

import time

import pytest

from data.dataset import read_manifest
from data.loader import ParquetSource
from data.synthetic import SyntheticConfig, generate
from experiments import caching
from experiments.caching import slow_filesystem


@pytest.mark.system
def test_quick_run_is_faster_from_the_cache(run_quick):
    figures = run_quick(caching.main, "caching")["figures"]
    assert figures.keys() == {"second_epoch_speedup", "first_epoch_ratio"}
    assert figures["first_epoch_ratio"] > 0
    assert figures["second_epoch_speedup"] > 1


def test_slow_storage_delays_reads_and_returns_the_same_rows(tmp_path):
    generate(SyntheticConfig(days=1, rows_per_day=2000, rows_per_block=1000, rows_per_file=2000), tmp_path)
    manifest = read_manifest(str(tmp_path))
    part = manifest.parts[0]
    filesystem = slow_filesystem(latency_s=0.05, bytes_per_s=1e6)
    slow = ParquetSource(str(tmp_path), manifest, filesystem=filesystem)
    start_s = time.monotonic()
    table = slow.read(part, 0)
    took_s = time.monotonic() - start_s
    assert table == ParquetSource(str(tmp_path), manifest).read(part, 0)
    column_bytes = sum(
        slow._open(f"{tmp_path}/{part.path}", part).metadata.row_group(0).column(i).total_compressed_size
        for i in range(table.num_columns)
    )
    assert took_s >= 0.05 + column_bytes / 1e6
