"""Which day a file belongs to."""

import pytest

from data.index.files import days_of


@pytest.mark.parametrize(
    ("paths", "days"),
    [
        (["a.parquet", "b.parquet"], [0, 1]),
        (["part-10.parquet", "part-9.parquet"], [1, 0]),
        (["day=7/a.parquet", "day=30/a.parquet", "day=7/b.parquet"], [7, 30, 7]),
        (["dt=2026-02-01/a.parquet", "dt=2026-01-31/a.parquet", "dt=2026-01-31/b.parquet"], [1, 0, 0]),
        (["month=9/day=30/a.parquet", "month=10/day=1/a.parquet"], [0, 1]),
        (["day=2026-01-31/a.parquet", "day=2026-02-01/a.parquet"], [0, 1]),
        (["logs/a.parquet", "logs/b.parquet"], [0, 1]),
    ],
)
def test_folders_or_else_files_tell_the_day(paths, days):
    assert [days_of(paths)[path] for path in paths] == days
