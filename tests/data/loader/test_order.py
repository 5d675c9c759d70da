"""The order of samples: nothing lost, nothing twice, the same again, whatever the resumes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader.order import ORDERS, Phase, PhaseOrder, Stripes, current_order, permutation
from data.loader.row_set import RowSet

even = st.builds(
    Phase,
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    window_batches=st.integers(1, 5),
    order=st.sampled_from(sorted(ORDERS)),
    steps=st.integers(0, 20),
)


@st.composite
def uneven(draw):
    """Phases with a batch size of each rank."""
    phase = draw(even)
    sizes = draw(st.lists(st.integers(1, 9), min_size=phase.world_size, max_size=phase.world_size))
    return replace(phase, sizes=tuple(sizes))


shapes = even | uneven()
settings_of_order = st.fixed_dictionaries(
    {"shuffle": st.booleans(), "seed": st.integers(0, 2**40), "epoch": st.integers(0, 3)}
)


def handed_out(order: PhaseOrder, rank: int, steps: range) -> list[np.ndarray]:
    """The valid rows of each step of one rank, read window by window as the loader does."""
    batches, size, step = [], order.phase.size(rank), steps.start
    while step < steps.stop:
        window = order.window(step, rank)
        assert window.batch_size == size
        assert len(window.order) % size == 0
        assert (np.diff(window.rows) > 0).all()
        samples = window.rows[window.order][: window.num_valid]
        for begin in range(0, len(window.order), size):
            batches.append(samples[begin : begin + size])
            step += 1
    return batches[: len(steps)]


def play(
    num_rows: int, phases: list[Phase], drop_last: bool, **config
) -> tuple[list[np.ndarray], PhaseOrder]:
    """All rows handed out by `phases` (each cut to what was left for it), and the last phase's order."""
    seen, done = [], []
    for phase in phases:
        order = current_order(num_rows, [*done, phase], **config)
        steps = min(phase.steps, order.num_steps(drop_last))
        for rank in range(phase.world_size):
            batches = handed_out(order, rank, range(steps))
            assert len(batches) == steps
            seen += batches
        done.append(Phase(**{**vars(phase), "steps": steps}))
    return seen, current_order(num_rows, done, **config)


@given(
    num_rows=st.integers(1, 400),
    phases=st.lists(shapes, min_size=1, max_size=4),
    config=settings_of_order,
)
@settings(max_examples=300)
def test_phases_yield_every_row_once_and_leave_less_than_a_global_batch(num_rows, phases, config):
    last = Phase(world_size=3, batch_size=4, window_batches=2, order=phases[-1].order, steps=10**6)
    phases = [*phases, last]
    seen, order = play(num_rows, phases, drop_last=True, **config)
    rows = np.concatenate([np.empty(0, np.int64), *seen])
    assert len(np.unique(rows)) == len(rows)
    assert num_rows - len(rows) < 3 * 4
    dropped = np.setdiff1d(np.arange(num_rows), rows)
    left = order.remaining(order.num_steps(drop_last=True))
    assert left.part(0, len(left)).tolist() == dropped.tolist()


@given(
    num_rows=st.integers(1, 400),
    phases=st.lists(shapes, min_size=1, max_size=3),
    config=settings_of_order,
)
@settings(max_examples=150)
def test_without_drop_last_every_row_is_yielded(num_rows, phases, config):
    last = Phase(world_size=4, batch_size=5, window_batches=3, order=phases[-1].order, steps=10**6)
    phases = [*phases, last]
    seen, order = play(num_rows, phases, drop_last=False, **config)
    assert sorted(np.concatenate(seen).tolist()) == list(range(num_rows))
    assert len(order.remaining(phases[-1].steps)) == 0


@given(num_rows=st.integers(20, 300), phase=shapes, split=st.integers(0, 20), config=settings_of_order)
@settings(max_examples=100)
def test_resuming_with_the_same_shape_changes_nothing(num_rows, phase, split, config):
    order = current_order(num_rows, [phase], **config)
    steps = order.num_steps(drop_last=False)
    split = min(split, steps)
    for rank in range(phase.world_size):
        whole = handed_out(order, rank, range(steps))
        resumed = handed_out(order, rank, range(split)) + handed_out(order, rank, range(split, steps))
        assert [batch.tolist() for batch in whole] == [batch.tolist() for batch in resumed]


@given(
    num_rows=st.integers(1, 300),
    phase=shapes,
    later=shapes,
    config=settings_of_order,
)
@settings(max_examples=100)
def test_padded_step_spreads_the_tail_as_whole_steps(num_rows, phase, later, config):
    order = current_order(num_rows, [phase, later], **config)
    if order.tail_rows == 0:
        assert order.num_steps(drop_last=False) == order.num_steps(drop_last=True)
        return
    windows = [order.window(order.full_steps, rank) for rank in range(later.world_size)]
    valid = [window.num_valid for window in windows]
    assert sum(valid) == order.tail_rows
    for rank, rows in enumerate(valid):
        assert abs(rows - order.tail_rows * later.size(rank) / later.global_batch) < 1
    assert [len(window.order) for window in windows] == [later.size(rank) for rank in range(len(windows))]
    assert all(window.order.max() < len(window.rows) for window in windows)


def test_without_shuffle_and_with_windows_of_one_batch_time_order_is_kept():
    order = current_order(
        20,
        [Phase(world_size=2, batch_size=3, window_batches=1)],
        shuffle=False,
        seed=0,
        epoch=0,
    )
    steps = [[handed_out(order, rank, range(step, step + 1))[0] for rank in range(2)] for step in range(3)]
    assert np.concatenate([rows for step in steps for rows in step]).tolist() == list(range(18))


def test_a_rank_reads_one_contiguous_run_a_window():
    order = current_order(
        1000, [Phase(world_size=4, batch_size=5, window_batches=10)], shuffle=True, seed=1, epoch=0
    )
    window = order.window(10, rank=2)
    assert window.rows.tolist() == list(range(200 + 100, 200 + 150))
    assert not np.array_equal(window.order, np.arange(50))


def test_new_shape_starts_with_the_rest_of_the_stripe():
    first = Phase(world_size=2, batch_size=2, window_batches=5, steps=3)
    seen, _ = play(60, [first], drop_last=True, shuffle=True, seed=3, epoch=0)
    second = Phase(world_size=1, batch_size=4, window_batches=2)
    order = current_order(60, [first, second], shuffle=True, seed=3, epoch=0)
    leftovers = np.setdiff1d(np.arange(20), np.concatenate(seen))
    assert np.sort(order.window(0, rank=0).rows).tolist() == leftovers.tolist()
    assert order.window(2, rank=0).rows.tolist() == list(range(20, 28))


@pytest.mark.parametrize("other", [(8, 0, 0), (7, 1, 0), (7, 0, 1)])
def test_seed_epoch_and_phase_change_the_order(other):
    rows, phase = RowSet.span(0, 100), Phase(world_size=1, batch_size=10, window_batches=10)
    orders = [Stripes(rows=rows, phase=phase, shuffle=True, key=key) for key in ((7, 0, 0), other)]
    one, two = (order.window(0, 0).order.tolist() for order in orders)
    assert one != two
    assert sorted(one) == sorted(two)


@given(
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 6),
    window_batches=st.integers(1, 5),
    steps=st.integers(1, 8),
    first_epoch=st.integers(0, 9),
    shuffle=st.booleans(),
)
@settings(max_examples=100)
def test_seldp_ranks_see_every_row_in_world_size_epochs(
    world_size, batch_size, window_batches, steps, first_epoch, shuffle
):
    """SelSync, arXiv 2307.07950: worker n reads chunks n, n + 1, ... and wraps."""
    phase = Phase(world_size=world_size, batch_size=batch_size, window_batches=window_batches, order="seldp")
    chunk = steps * batch_size
    num_rows = world_size * chunk + min(world_size * batch_size - 1, 3)
    for rank in range(world_size):
        seen = []
        for epoch in range(first_epoch, first_epoch + world_size):
            order = current_order(num_rows, [phase], shuffle=shuffle, seed=1, epoch=epoch)
            assert order.full_steps == steps
            batches = handed_out(order, rank, range(steps))
            begin = (rank + epoch) % world_size * chunk
            for number, batch in enumerate(batches):  # no batch is ahead or behind by more than its window
                window = number // window_batches * window_batches * batch_size
                assert (batch >= begin + window).all()
                assert (batch < begin + min(chunk, window + window_batches * batch_size)).all()
            seen += batches
        assert sorted(np.concatenate(seen).tolist()) == list(range(world_size * chunk))


def test_seldp_without_shuffle_keeps_time_order_on_each_rank():
    phase = Phase(world_size=3, batch_size=2, window_batches=2, order="seldp")
    order = current_order(20, [phase], shuffle=False, seed=0, epoch=1)
    ranks = [np.concatenate(handed_out(order, rank, range(3))).tolist() for rank in range(3)]
    assert ranks == [list(range(6, 12)), list(range(12, 18)), list(range(6))]
    assert [order.window(3, rank).rows.tolist() for rank in range(3)] == [[18], [18], [19]]


def test_new_world_size_continues_all_chunks():
    first = Phase(world_size=2, batch_size=2, window_batches=2, order="seldp", steps=3)
    second = Phase(world_size=3, batch_size=2, window_batches=2, order="seldp")
    order = current_order(40, [first, second], shuffle=False, seed=0, epoch=0)
    left = [*range(6, 20), *range(26, 40)]
    ranks = [np.concatenate(handed_out(order, rank, range(4))).tolist() for rank in range(3)]
    assert ranks == [left[:8], left[8:16], left[16:24]]
    assert order.tail_rows == 4


def test_permutation_is_pinned():
    """Stored positions rely on this order: changing it breaks every run that resumes in mid-epoch."""
    assert permutation(10, (0, 1, 2, 3, 4)).tolist() == [8, 1, 4, 7, 5, 2, 6, 9, 3, 0]
    assert sorted(permutation(1000, (5,)).tolist()) == list(range(1000))
