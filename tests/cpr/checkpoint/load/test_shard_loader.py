"""Loading shards: any layout into any other, rows with their optimizer state, no damaged byte."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpr.checkpoint.catalog.chain import State, find_states
from cpr.checkpoint.format.manifest import Manifest, save_folder
from cpr.checkpoint.load.shard_loader import bytes_to_read, load_shards, read_state_file
from cpr.checkpoint.save.writer_thread import RankWriter
from cpr.errors import CorruptFileError, MismatchError
from cpr.extent import Extent, Interval
from cpr.shards.shard import TableShard
from tests.cpr.checkpoint.saves import MemoryStorage, make_shard, randomise, save

ROWS, COLS = 100, 8
Box = tuple[Interval, Interval]
"""Rows and columns."""


def newest_state(storage: MemoryStorage) -> State:
    states, rejected = find_states(storage)
    assert rejected == []
    return states[0]


def random_shards(boxes: Sequence[Box], generator: torch.Generator, **fields: Any) -> list[TableShard]:
    shards = [make_shard(rows=rows, cols=cols, **fields) for rows, cols in boxes]
    for shard in shards:
        randomise(shard, generator)
    return shards


class Reference:
    """A table in plain sight: the newest number saved for every element, also of state that is per row."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.elements: dict[str, Tensor] = {}

    def save(self, shard: TableShard, ids: Tensor) -> None:
        cols = slice(*shard.extent.cols)
        for name, column in shard.columns.items():
            saved = column[ids - shard.row_offset].double()
            whole = self.elements.setdefault(name, torch.full(self.shape, torch.nan, dtype=torch.double))
            whole[ids, cols] = saved if saved.dim() == 2 else saved[:, None]

    def column(self, shard: TableShard, name: str) -> Tensor:
        """What a shard should hold: state that is per row is the mean over the shard's columns."""
        rows, cols = shard.extent.rows, shard.extent.cols
        whole, live = self.elements[name][slice(*rows), slice(*cols)], shard.columns[name]
        return (whole if live.dim() == 2 else whole.sum(1) / whole.shape[1]).to(live.dtype)

    def check(self, shard: TableShard) -> None:
        for name, column in shard.columns.items():
            assert torch.equal(column, self.column(shard, name)), name


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# Any layout into any other


def intervals(draw: Callable[..., Any], size: int) -> list[tuple[int, int]]:
    cuts = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return list(pairwise([0, *sorted(cuts), size]))


@st.composite
def layouts(draw: Callable[..., Any], shape: tuple[int, int]) -> list[Box]:
    """The table cut into pieces: by rows and each of these by columns, or the other way round."""
    rows_first = draw(st.booleans())
    boxes = []
    for outer in intervals(draw, shape[0 if rows_first else 1]):
        for inner in intervals(draw, shape[1 if rows_first else 0]):
            boxes.append((outer, inner) if rows_first else (inner, outer))
    return boxes


@st.composite
def histories(draw: Callable[..., Any]) -> tuple[dict[str, Any], list[list[Box]], list[Box], int]:
    """A table, the layouts of its base and its row saves, that of the model it is loaded into, and a seed."""
    shape = draw(st.integers(1, 40)), draw(st.integers(1, COLS))
    table = {
        "shape": shape,
        "states": draw(st.sampled_from([{}, {"sum": True}, {"exp_avg": False, "exp_avg_sq": True}])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    }
    base = draw(layouts(shape))
    later = draw(st.lists(st.just(base) | layouts(shape), max_size=3))
    return table, [base, *later], draw(st.just(base) | layouts(shape)), draw(st.integers(0, 2**31))


def write_history(
    storage: MemoryStorage, table: dict[str, Any], saved: list[list[Box]], generator: torch.Generator
) -> Reference:
    reference, parent = Reference(table["shape"]), None
    for sequence, boxes in enumerate(saved):
        shards = random_shards(boxes, generator, **table)
        ids = {}
        for shard in shards:
            chosen = torch.rand(shard.num_rows, generator=generator) < (0.4 if parent else 1.0)
            ids[shard.name] = chosen.nonzero().squeeze(1) + shard.row_offset
            reference.save(shard, ids[shard.name])
        rows_per_chunk = int(torch.randint(1, 17, (), generator=generator))
        parent = save(storage, sequence, shards, parent, ids, rows_per_chunk)
    return reference


@settings(max_examples=60)
@given(history=histories(), together=st.booleans())
def test_any_layout_loads_into_any_other(history, together):
    table, saved, wanted, seed = history
    storage = MemoryStorage()
    reference = write_history(storage, table, saved, torch.Generator().manual_seed(seed))
    state = newest_state(storage)
    shards = [make_shard(rows=rows, cols=cols, **table) for rows, cols in wanted]
    for group in [shards] if together else [[shard] for shard in shards]:
        storage.reads.clear()
        bytes_read = load_shards(storage, state, group)
        assert sorted(storage.reads) == sorted(overlapping_chunks(state, group))
        assert bytes_read == sum(length for _, _, length in storage.reads)
    for shard in shards:
        reference.check(shard)


def overlapping_chunks(state: State, shards: Sequence[TableShard]) -> set[tuple[str, int, int]]:
    """Path, offset and length of what a load must read, and no more."""
    return {
        (f"{save_folder(manifest.sequence)}/{entry.path}", chunk.offset, chunk.length)
        for manifest in state.saves
        for entry in manifest.rows
        for chunk in entry.chunks
        for shard in shards
        if entry.extent.overlap(shard.extent)
        and chunk.first_row < shard.row_offset + shard.num_rows
        and shard.row_offset <= chunk.last_row
    }


# Row-wise state of column shards


def test_the_mean_of_equal_row_wise_state_is_exact():
    storage = MemoryStorage()
    save(storage, 0, [column_shard(cols, 1 / 3) for cols in ((0, 1), (1, 3), (3, 8))])
    whole = make_shard()
    load_shards(storage, newest_state(storage), [whole])
    assert (whole.optimizer_state["sum"] == torch.tensor(1 / 3)).all()


def column_shard(cols: tuple[int, int], value: float) -> TableShard:
    shard = make_shard(cols=cols)
    for column in shard.columns.values():
        column.fill_(value)
    return shard


# What is read, and how


@pytest.fixture
def saved(generator) -> tuple[MemoryStorage, Reference]:
    """A base of 4 row pieces x 2 column pieces and two row saves, chunks of 5 rows."""
    storage, reference = MemoryStorage(), Reference((ROWS, COLS))
    boxes = [((row, row + 25), (col, col + 4)) for row in range(0, ROWS, 25) for col in (0, 4)]
    parent: Manifest | None = None
    for sequence in range(3):
        shards = random_shards(boxes, generator)
        ids = {
            shard.name: torch.arange(shard.row_offset, shard.row_offset + 25, 1 if parent is None else 3)
            for shard in shards
        }
        for shard in shards:
            reference.save(shard, ids[shard.name])
        parent = save(storage, sequence, shards, parent, ids, rows_per_chunk=5, state={"save": sequence})
    return storage, reference


def test_progress_adds_up_to_the_bytes_to_read(saved):
    storage, _ = saved
    state, shards, seen = newest_state(storage), [make_shard(rows=(3, 60))], []
    bytes_read = load_shards(storage, state, shards, progress=seen.append)
    assert sum(seen) == bytes_read == bytes_to_read(state, shards)
    assert len(seen) > 1


def test_planning_a_load_compares_a_shard_with_the_files_of_its_table_alone(monkeypatch):
    """Or it would take seconds for hundreds of tables."""
    compared, overlap = [0], Extent.overlap

    def counted(self: Extent, other: Extent) -> Extent | None:
        compared[0] += 1
        return overlap(self, other)

    storage = MemoryStorage()
    shards = [make_shard(f"model.t{number}") for number in range(20)]
    save(storage, 0, shards)
    state = newest_state(storage)
    monkeypatch.setattr(Extent, "overlap", counted)
    bytes_to_read(state, shards[:1])
    of_one, compared[0] = compared[0], 0
    bytes_to_read(state, shards)
    assert 0 < compared[0] == 20 * of_one


def test_each_thread_reuses_one_buffer(saved):
    addresses: set[int] = set()
    storage, state = saved[0], newest_state(saved[0])
    storage.before = lambda method, path, buffer: buffer and addresses.add(address_of(buffer))
    load_shards(storage, state, [make_shard()])
    assert len(storage.reads) > 20
    assert len(addresses) <= storage.readers


def address_of(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def test_chunks_are_read_in_parallel(saved):
    storage, state = saved[0], newest_state(saved[0])
    first_reads, barrier = iter(range(storage.readers)), threading.Barrier(storage.readers)

    def wait_for_others(*_: object) -> None:
        if next(first_reads, None) is not None:
            barrier.wait(timeout=30)  # fails if no other thread reads

    storage.before = wait_for_others
    load_shards(storage, state, [make_shard()])


def test_newer_rows_win_if_older_ones_are_read_later(saved):
    """One chunk of the base is held back until the thread that reads ahead has read a row save."""
    storage, reference = saved
    state, later = newest_state(storage), threading.Event()

    def hold_back(method: str, path: str, _: object) -> None:
        if path == "saves/00000001/model.t/r0-c0.arrow":
            later.set()
        if path == "saves/00000000/model.t/r0-c0.arrow":
            assert later.wait(timeout=30)

    storage.before = hold_back
    shard = make_shard(rows=(0, 5), cols=(0, 4))
    load_shards(storage, state, [shard])
    reference.check(shard)


# Caches and counters


def test_device_caches_are_flushed_before_and_invalidated_after_a_load():
    events: list[str] = []
    storage = MemoryStorage()
    save(storage, 0, [column_shard((0, 8), 1.0)], state=None)
    there = make_shard(counters={"iter": torch.tensor(41)})
    for column in there.columns.values():
        column.fill_(1.0)
    save(storage, 1, [there])
    counter = torch.tensor(0)

    def note(what: str) -> Callable[[], None]:
        return lambda: events.append(f"{what} {shard.weights[0, 0].item()} {counter.item()}")

    shard = make_shard(counters={"iter": counter}, flush=note("flush"), invalidate=note("invalidate"))
    load_shards(storage, newest_state(storage), [shard])
    assert events == ["flush nan 0", "invalidate 1.0 41"]


def test_counters_that_only_one_kernel_has_are_left_alone():
    """Kernels differ in what they count: a data-parallel table's is not the fused one's."""
    storage = MemoryStorage()
    save(storage, 0, [make_shard(counters={"iter": torch.tensor(41), "learning_rate": torch.tensor(0.5)})])
    here = make_shard(counters={"iter": torch.tensor(0), "step": torch.tensor(7)})
    load_shards(storage, newest_state(storage), [here])
    assert {name: counter.item() for name, counter in here.counters.items()} == {"iter": 41, "step": 7}


# Faults


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_a_truncated_or_missing_file_is_named_and_no_thread_is_left(saved, fault):
    storage, _ = saved
    path = "saves/00000000/model.t/r0-c4.arrow"
    state = newest_state(storage)
    last = next(entry for entry in state.saves[0].rows if path.endswith(entry.path)).chunks[-1]
    storage.files[path] = storage.files[path][: last.offset + last.length - 1]
    if fault == "missing":
        del storage.files[path]
    with pytest.raises(CorruptFileError, match=path):
        load_shards(storage, state, [make_shard()])


def test_nothing_is_read_after_a_fault(saved, monkeypatch):
    storage, _ = saved
    monkeypatch.setattr(storage, "readers", 1)
    state = newest_state(storage)
    first, *_ = state.saves[0].rows
    storage.flip_bit(f"saves/00000000/{first.path}", first.chunks[0].offset)
    storage.reads.clear()
    with pytest.raises(CorruptFileError, match=first.path):
        load_shards(storage, state, [make_shard()])
    assert [offset for _, offset, _ in storage.reads] == [first.chunks[0].offset]


def test_device_caches_are_invalidated_after_a_failed_load(saved):
    storage, _ = saved
    del storage.files["saves/00000000/model.t/r0-c0.arrow"]
    forgotten = []
    with pytest.raises(CorruptFileError):
        load_shards(storage, newest_state(storage), [make_shard(invalidate=lambda: forgotten.append(True))])
    assert forgotten == [True]


def test_a_state_of_another_model_changes_nothing(saved):
    storage, _ = saved
    fits, other = make_shard(), make_shard(fqn="model.other")
    with pytest.raises(MismatchError, match=r"model\.other"):
        load_shards(storage, newest_state(storage), [fits, other])
    assert fits.weights.isnan().all()


# State files


def test_the_state_file_of_the_newest_save_is_read(saved):
    storage, _ = saved
    states, _ = find_states(storage)
    assert [read_state_file(storage, state, None)["save"] for state in states] == [2, 1, 0]
    assert read_state_file(storage, states[0], rank=0) is None


HUGE = 2**60


def forged(storage, **fields):
    """The newest state, its manifest with other fields."""
    state = newest_state(storage)
    return State((*state.saves[:-1], replace(state.newest, **fields)))


def test_forged_sizes_do_not_exhaust_memory(saved):
    storage, _ = saved
    save = newest_state(storage).newest
    chunk = replace(save.rows[0].chunks[0], length=HUGE)
    entry = replace(save.rows[0], chunks=(chunk,))
    shard = make_shard()
    with pytest.raises(CorruptFileError, match=rf"a chunk of {HUGE} at byte {chunk.offset}"):
        load_shards(storage, forged(storage, rows=(entry,)), [shard])
    assert shard.weights.isnan().all()
    state = replace(save.states[0], num_bytes=HUGE)
    with pytest.raises(CorruptFileError, match=rf"bytes, the manifest says {HUGE}"):
        read_state_file(storage, forged(storage, states=(state,)), None)


def test_a_counter_that_its_tensor_cannot_hold_changes_nothing(saved):
    storage, _ = saved
    tables = newest_state(storage).newest.tables
    tables = {fqn: replace(table, counters={"iter": 2**40}) for fqn, table in tables.items()}
    shard = make_shard(counters={"iter": torch.tensor(7, dtype=torch.int32)})
    with pytest.raises(CorruptFileError, match=r"iter of model\.t is 1099511627776, which is no"):
        load_shards(storage, forged(storage, tables=tables), [shard])
    assert shard.weights.isnan().all()
    assert shard.counters["iter"] == 7


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "holds a list"),
        ({"dense": {}, "steps_done": 20}, "no registered states"),
        ({"dense": {"w": 1.0}, "registered": {}, "steps_done": 20}, "not all tensors"),
        ({"dense": {}, "registered": {}, "steps_done": 21}, "of step 21, its manifest of step 20"),
    ],
)
def test_a_state_of_another_form_is_refused_with_its_file(saved, tree, message):
    storage, _ = saved
    writer = RankWriter(storage, save_folder(2), "exact", with_ids=True)
    writer.write_state(tree, None)
    states = tuple(writer.finish({}).states)
    with pytest.raises(CorruptFileError, match=f"saves/00000002/state.arrow.*{message}"):
        read_state_file(storage, forged(storage, states=states), None)


def test_a_damaged_state_file_is_refused(saved):
    storage, _ = saved
    path = "saves/00000002/state.arrow"
    storage.flip_bit(path, len(storage.files[path]) // 2)
    with pytest.raises(CorruptFileError, match=rf"{path} differs from its digest"):
        read_state_file(storage, newest_state(storage), None)
