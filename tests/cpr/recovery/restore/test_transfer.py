"""Every row has one source, whatever the old and the new layout; what is preferred, what counts as lost."""

from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.extent import Extent
from cpr.recovery.decide.assessment import Held, Needed
from cpr.recovery.decide.inventory import ChosenSlots
from cpr.recovery.restore.transfer import (
    RowTransfer,
    lost_share,
    lost_share_by_rank,
    origins,
    plan_sources,
    with_chosen,
)
from cpr.recovery.run.report import RowOrigin
from cpr.shards.shard import TableShard
from tests.cpr.checkpoint.world import PATIENCE_S, ThreadGroup, run_ranks

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


class Post(ThreadGroup):
    """Ranks that also send to each other."""

    def _queue(self, source, target):
        return self._board.values.setdefault((source, target), SimpleQueue())

    def send(self, data, rank):
        self._queue(self.rank, rank).put(data.clone())

    def receive(self, data, rank):
        data.copy_(self._queue(rank, self.rank).get(timeout=PATIENCE_S))


def columns(num_rows, value):
    return {"sum": torch.full((num_rows,), value), "weights": torch.full((num_rows, DIM), value)}


CHOSEN = st.sets(st.integers(0, 39))


@given(chosen=st.tuples(CHOSEN, CHOSEN), is_survivor_half=st.booleans(), message_bytes=st.integers(40, 400))
def test_rows_of_mirrors_of_chosen_rows_lie_over_those_of_the_save(chosen, is_survivor_half, message_bytes):
    """Both halves of a table were lost, or one; rank 0 has mirrors of both, and rank 1 needs all rows."""
    first = {row for row in chosen[0] if row < 20}
    second = {row for row in chosen[1] if row >= 20}
    need = [needed((0, 40), rank=1)]
    live = [held((0, 20), rank=1, index=0)] if is_survivor_half else []
    mirrors = [
        replace(held((begin, begin + 20), rank=0, index=index), is_mirror=True, is_chosen=True)
        for index, begin in ((0, 0), (1, 20))
    ]

    def run(group):
        slots, data, extents = {}, [], []
        if group.rank == 0:
            for index, rows in enumerate((first, second)):
                order = torch.randperm(len(rows)) + 1  # slot 0 is empty
                slots[index] = ChosenSlots(torch.tensor(sorted(rows), dtype=torch.int64), order)
                mirror = columns(21, -1.0)
                for row, slot in zip(sorted(rows), order.tolist(), strict=True):
                    mirror["sum"][slot] = mirror["weights"][slot] = 100.0 + row
                data.append(mirror)
                extents.append(mirrors[index].extent)
        else:
            data, extents = [columns(20, 7.0)], [place((0, 20))]
        model = columns(40, 0.0)
        shard = TableShard(
            table_fqn="a",
            table_shape=(40, DIM),
            row_offset=0,
            col_offset=0,
            replicated=False,
            weights=model.pop("weights"),
            optimizer_state=model,
        )
        plan = with_chosen(group, plan_sources(need, live), mirrors, slots)
        transfer = RowTransfer(group, [shard] if group.rank else [], data, extents, slots)
        transfer.move(plan)
        moved = transfer.move_chosen(plan)
        return plan, shard, moved

    with patch("cpr.recovery.restore.transfer.MESSAGE_BYTES", message_bytes):
        (plan, _, _), (same, shard, moved) = run_ranks(run, kind=Post)
    assert plan == same
    expected = torch.zeros(40)
    mirrored = sorted(second if is_survivor_half else first | second)
    expected[mirrored] = 100.0 + torch.tensor(mirrored)
    if is_survivor_half:
        expected[:20] = 7.0
    assert torch.equal(shard.optimizer_state["sum"], expected)
    assert torch.equal(shard.weights, expected[:, None].expand(40, DIM))
    num_live, num_mirrored = 20 * is_survivor_half, len(mirrored)
    assert moved == 36 * (num_live + num_mirrored)
    (origin,) = origins(plan)
    assert (origin.moved, origin.mirrored, origin.lost) == (
        num_live,
        num_mirrored,
        40 - num_live - num_mirrored,
    )


def test_a_mirror_of_other_columns_of_chosen_rows_is_not_used():
    mirror = replace(held((0, 40), (0, 4)), is_mirror=True, is_chosen=True)
    slots = {0: ChosenSlots(torch.arange(3), torch.arange(3))}
    plan = plan_sources([needed((0, 40))], [])
    ((sources,),) = run_ranks(lambda group: with_chosen(group, plan, [mirror], slots), 1)
    assert (sources.mirrored_rows, sources.lost_rows) == (0, 40)
