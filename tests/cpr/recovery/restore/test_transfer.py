"""Every row has one source, whatever the old and the new layout; what is preferred, what counts as lost."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpr.extent import Extent
from cpr.recovery.decide.assessment import Held, Needed
from cpr.recovery.restore.transfer import lost_share, lost_share_by_rank, origins, plan_sources
from cpr.recovery.run.report import RowOrigin

DIM = 8


def place(rows, cols=(0, DIM), shape=(40, DIM), table="a"):
    return Extent(
        table_fqn=table,
        table_shape=shape,
        row_offset=rows[0],
        num_rows=rows[1] - rows[0],
        col_offset=cols[0],
        num_cols=cols[1] - cols[0],
    )


def held(rows, cols=(0, DIM), *, rank=0, index=0, step=5, generation=0, is_mirror=False, **options):
    extent = place(rows, cols, **options)
    return Held(rank=rank, index=index, extent=extent, step=step, generation=generation, is_mirror=is_mirror)


def needed(rows, cols=(0, DIM), *, rank=0, **options):
    return Needed(rank=rank, extent=place(rows, cols, **options), bytes_per_row=4 * (cols[1] - cols[0] + 1))


def split(table, shape, kind, world_size, shift):
    """(rank, place) of a table under a TorchRec plan."""
    rows, cols = shape
    if kind == "tw":
        return [(shift % world_size, place((0, rows), (0, cols), shape, table))]
    parts = world_size
    size = rows if kind == "rw" else cols
    block = -(-size // parts)
    ranges = [(min(i * block, size), min((i + 1) * block, size)) for i in range(parts)]
    found = []
    for rank, interval in enumerate(ranges):
        if interval[0] < interval[1]:
            box = (interval, (0, cols)) if kind == "rw" else ((0, rows), interval)
            found.append(((rank + shift) % world_size, place(*box, shape, table)))
    return found


@st.composite
def layouts(draw):
    tables = {
        f"t{i}": (draw(st.integers(1, 30)), draw(st.integers(1, 12))) for i in range(draw(st.integers(1, 3)))
    }

    def layout():
        world_size = draw(st.integers(1, 5))
        return world_size, [
            each
            for name, shape in tables.items()
            for each in split(
                name, shape, draw(st.sampled_from(["tw", "cw", "rw"])), world_size, draw(st.integers(0, 4))
            )
        ]

    (old_size, old), (_, new) = layout(), layout()
    dead = draw(st.sets(st.integers(0, old_size - 1)))
    return tables, old, new, dead


@given(layouts())
def test_every_row_of_every_new_shard_has_exactly_one_source(case):
    tables, old, new, dead = case
    holders = [
        Held(rank=rank, index=index, extent=each, step=5, generation=0)
        for index, (rank, each) in enumerate(old)
        if rank not in dead
    ]
    is_held = {name: np.zeros(shape, dtype=bool) for name, shape in tables.items()}
    for each in holders:
        at = each.extent
        is_held[at.table_fqn][
            at.row_offset : at.row_offset + at.num_rows, at.col_offset : at.col_offset + at.num_cols
        ] = True

    plan = plan_sources([Needed(rank=rank, extent=each, bytes_per_row=4) for rank, each in new], holders)

    for sources in plan:
        at = sources.needed.extent
        end = at.row_offset + at.num_rows
        counts = np.zeros((at.num_rows, at.num_cols), dtype=int)
        for band in sources.bands:
            rows = slice(band.rows[0] - at.row_offset, band.rows[1] - at.row_offset)
            if not band.sources:
                counts[rows] += 1
            for piece in band.sources:
                (source,) = [each for each in holders if (each.rank, each.index) == (piece.rank, piece.index)]
                begin, stop = source.extent.row_offset, source.extent.row_offset + source.extent.num_rows
                assert source.extent.table_fqn == at.table_fqn
                assert begin <= band.rows[0] < band.rows[1] <= stop
                assert source.extent.col_offset <= piece.cols[0]
                assert piece.cols[1] <= source.extent.col_offset + source.extent.num_cols
                counts[rows, piece.cols[0] - at.col_offset : piece.cols[1] - at.col_offset] += 1
        assert (counts == 1).all()
        mine = is_held[at.table_fqn][at.row_offset : end, at.col_offset : at.col_offset + at.num_cols]
        lost = np.ones(at.num_rows, dtype=bool)
        for band in sources.bands:
            if band.sources:
                lost[band.rows[0] - at.row_offset : band.rows[1] - at.row_offset] = False
        np.testing.assert_array_equal(lost, ~mine.all(1))  # nothing that is there is thrown away
        assert (sources.moved_rows, sources.lost_rows) == ((~lost).sum(), lost.sum())
        lost_rows = [row for interval in sources.lost_ranges for row in range(*interval)]
        assert lost_rows == list(np.flatnonzero(lost) + at.row_offset)
        assert all(one.sources != two.sources for one, two in pairwise(sources.bands))


def test_the_newest_generation_is_preferred_then_steps_then_the_worker_itself_then_the_lowest_rank():
    def chosen(*candidates, rank=0):
        (sources,) = plan_sources([needed((0, 40), rank=rank)], candidates)
        return [piece.rank for band in sources.bands for piece in band.sources]

    assert chosen(held((0, 40), rank=1, generation=1, step=4), held((0, 40), rank=2, step=6)) == [1]
    assert chosen(held((0, 40), rank=1), held((0, 40), rank=2, step=6)) == [2]
    assert chosen(held((0, 40), rank=1), held((0, 40), rank=2), rank=2) == [2]
    assert chosen(held((0, 40), rank=2), held((0, 40), rank=1)) == [1]


def test_a_table_of_another_size_is_no_source():
    (sources,) = plan_sources([needed((0, 40))], [held((0, 40), shape=(50, DIM))])
    assert sources.lost_rows == 40


def test_lost_share_counts_bytes():
    wide = Needed(rank=0, extent=place((0, 10), shape=(10, DIM)), bytes_per_row=30)
    narrow = Needed(rank=1, extent=place((0, 10), shape=(10, DIM), table="b"), bytes_per_row=10)
    held_wide = [held((0, 10), shape=(10, DIM))]
    assert lost_share(plan_sources([wide, narrow], held_wide)) == 0.25
    assert lost_share([]) == 0.0
    both = replace(narrow, rank=2), replace(wide, rank=2)
    assert lost_share_by_rank(plan_sources([wide, narrow, *both], held_wide)) == {1: 1.0, 2: 0.25}


def test_rows_by_origin_are_counted_over_all_shards_of_a_table():
    plan = plan_sources([replace(needed((0, 10)), adopted=True), needed((10, 40))], [held((10, 20))])
    assert origins(plan) == (RowOrigin(table_fqn="a", adopted=10, moved=10, lost=20),)
