"""Each chosen row gets a slot of its own, and a mirror keeps within its memory."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.extent import Extent
from cpr.mirror.chosen_rows import ChosenRows, Slots
from cpr.mirror.config import MirrorConfig
from cpr.mirror.copy import ShardForm
from cpr.recovery.decide.inventory import _chosen_slots
from cpr.shards import find_shards
from tests.cpr.shards.models import bags, shard

NUM_ROWS, NUM_SLOTS = 9, 4
CHOICES = st.sets(st.integers(0, NUM_ROWS - 1), max_size=NUM_SLOTS)


@given(st.lists(st.tuples(CHOICES, st.lists(st.integers(0, 3), max_size=3), st.booleans()), max_size=5))
def test_what_is_chosen_joins_and_takes_the_slots_of_what_is_not(choices):
    slots, everything = Slots(NUM_ROWS, NUM_SLOTS), torch.arange(NUM_ROWS)
    mirror = np.full(NUM_SLOTS, -1)  # what its keeper knows

    def join(limit, chosen):
        rows, places = (each.tolist() for each in slots.places(torch.from_numpy(slots.join(limit))))
        assert set(rows) <= chosen
        assert not set(mirror[places]) & chosen, "one that stays was overwritten"
        mirror[places] = rows
        held, places = slots.places(everything)
        assert sorted(mirror[mirror >= 0]) == held.tolist()
        assert mirror[places.numpy()].tolist() == held.tolist() == slots.rows_at(places).tolist()
        assert slots.num_rows == len(held)

    for chosen, limits, is_lost in choices:
        slots.choose(np.array(sorted(chosen), np.int64))
        for limit in limits:
            join(limit, chosen)
        if is_lost:
            can_join = chosen | set(mirror[mirror >= 0])
            slots.join_again()
            mirror[:] = -1
            join(NUM_SLOTS, can_join)
        join(NUM_SLOTS, chosen)
        assert chosen <= set(mirror)


@pytest.fixture
def model(world_of_one):
    return shard({"a": "tw", "b": "unfused", "c": "rw"}, bags=bags(a=400, b=7, c=300))


def test_the_memory_is_kept(model):
    shards = find_shards(model, [])

    def chosen(memory):
        return ChosenRows(MirrorConfig(rows="priority", memory=memory), shards, model)

    assert not chosen("1MB").num_slots, "all rows fit"
    for memory in (1_000, 9_999, 24_000):
        found = chosen(f"{memory}B")
        forms = [ShardForm.of(each, found.num_slots.get(number)) for number, each in enumerate(shards)]
        held = sum(
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for form in forms
            for dtype, shape in form.columns.values()
        )
        assert memory - 200 < held <= memory
        assert [shards[number].table_name for number in found.num_slots] == ["a", "c"]
    for memory in ("300B", "600B"):
        with pytest.raises(NotEnoughMemoryError, match=rf"memory is {memory[:-1]} B.* give more, such as"):
            chosen(memory)


@pytest.mark.parametrize(
    ("numbers", "rows"),
    [
        ([0, 3, 1, 0], [5, 7]),
        ([0, 0, 0, 0], []),
        ([2, 0, 2, 1], None),
        ([6, 0, 0, 0], None),
        ([-1, 0, 0, 0], None),
    ],
)
def test_which_rows_a_mirror_has_is_checked(numbers, rows):
    place = {"table_fqn": "t", "table_shape": (10, 2), "col_offset": 0, "num_cols": 2}
    extent = Extent(row_offset=5, num_rows=4, **place)
    if rows is None:
        with pytest.raises(DamagedMemoryError, match="not those of a shard"):
            _chosen_slots(extent, torch.tensor(numbers))
    else:
        found = _chosen_slots(extent, torch.tensor(numbers))
        assert (found.rows.tolist(), found.slots.tolist()) == (rows, [2, 1] if rows else [])


def test_the_configuration_says_what_to_set():
    with pytest.raises(ValueError, match=r"set that, e\.g\. to 4GB"):
        MirrorConfig(rows="priority")
    with pytest.raises(ValueError, match=r"set mirror\.rows=priority, too"):
        MirrorConfig(memory="4GB")
    for memory in ("4", 4, 0):
        with pytest.raises(ValueError, match=rf"mirror\.memory is {memory}; .* with its unit"):
            MirrorConfig(rows="priority", memory=memory)
    for rows in ("all", "priority"):
        with pytest.raises(ValueError, match=r"mirror\.memory=0MB has no room for any row"):
            MirrorConfig(rows=rows, memory="0MB")
