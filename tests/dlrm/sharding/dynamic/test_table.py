"""Assignment and eviction of rows, against a plain dictionary given the same batches."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.sharding.dynamic.columns import HostColumns
from dlrm.sharding.dynamic.index import initial_values
from dlrm.sharding.dynamic.table import EVICTION_SHARE, Candidates, DynamicTable, columns_of_rows

DIM, SEED, RANGE = 4, 11, (-0.25, 0.5)
EXTREMES = [0, -1, 1, -(2**63), 2**63 - 1]
FEW_IDS = st.sampled_from([*EXTREMES, *range(100, 140)])
BATCHES = st.lists(st.lists(FEW_IDS, max_size=12), max_size=12)


class Memory:
    """What a table keeps in resident memory: weights, optimizer state and columns."""

    def __init__(self, capacity, admit_after=1):
        self.admit_after = admit_after
        self.weights = torch.full((capacity, DIM), 9.0)
        self.state = torch.full((capacity,), 9.0)
        self.columns = {
            name: torch.zeros(capacity, dtype=dtype) for name, dtype in columns_of_rows(admit_after).items()
        }

    def open(self, **told):
        return DynamicTable(
            "t",
            self.weights,
            [self.state],
            self.columns,
            admit_after=self.admit_after,
            seed=SEED,
            initial_range=RANGE,
            **told,
        )

    def ids(self):
        """Rows by id, from the columns alone."""
        used = (self.columns["last_seen"] > 0).nonzero().squeeze(1).tolist()
        return {int(self.columns["id"][row]): row for row in used}

    def copy(self):
        other = Memory(len(self.weights), self.admit_after)
        for name, column in self.columns.items():
            other.columns[name].copy_(column)
        other.weights.copy_(self.weights)
        other.state.copy_(self.state)
        return other


class Oracle:
    """The rules in the plainest way, ids getting rows at once."""

    def __init__(self, capacity):
        self.capacity, self.clock = capacity, 0
        self.row_of, self.seen = {}, {}

    def train_on(self, ids):
        self.clock += 1
        for each in set(ids) & self.row_of.keys():
            self.seen[each] = self.clock
        new = Counter(each for each in ids if each not in self.row_of)
        self._evict(len(new))
        free = sorted(set(range(self.capacity)) - set(self.row_of.values()))
        chosen = sorted(sorted(new, key=lambda each: (-new[each], each))[: len(free)])
        for each, row in zip(chosen, free, strict=False):
            self.row_of[each], self.seen[each] = row, self.clock
        return [self.row_of.get(each, -1) for each in ids]

    def _evict(self, wanted):
        free = self.capacity - len(self.row_of)
        if free >= wanted:
            return
        idle = [each for each in self.row_of if self.seen[each] < self.clock]
        idle.sort(key=lambda each: (self.seen[each], self.row_of[each]))
        for each in idle[: max(wanted - free, self.capacity // EVICTION_SHARE)]:
            del self.row_of[each]


def tensor(ids):
    return torch.tensor(ids, dtype=torch.int64)


@given(st.integers(1, 40), BATCHES, BATCHES)
def test_rows_are_assigned_and_evicted_like_the_oracle(capacity, batches, more):
    memory, oracle = Memory(capacity), Oracle(capacity)
    table = memory.open()
    for batch in batches:
        assert table.train_on(tensor(batch)).tolist() == oracle.train_on(batch)
        assert memory.ids() == oracle.row_of
        assert table.num_ids == len(oracle.row_of) <= capacity
        assert len(set(memory.ids().values())) == len(oracle.row_of)
    asked = [*EXTREMES, *range(100, 140)]
    assert table.find(tensor(asked)).tolist() == [oracle.row_of.get(each, -1) for each in asked]
    table = memory.copy().open()  # what is derived begins anew, and goes on the same
    for batch in more:
        assert table.train_on(tensor(batch)).tolist() == oracle.train_on(batch)


@given(st.integers(1, 20), st.integers(2, 4), BATCHES)
def test_no_id_gets_a_row_before_admission(capacity, admit_after, batches):
    memory = Memory(capacity, admit_after)
    table, sightings = memory.open(), Counter()
    for batch in batches:
        before = memory.ids()
        sightings.update(batch)
        rows = table.train_on(tensor(batch)).tolist()
        after = memory.ids()
        assert rows == [after.get(each, -1) for each in batch]
        assert len(after) <= capacity
        assert before.keys() & set(batch) <= after.keys()  # whoever is in use stays
        for each in after.keys() - before.keys():
            assert each in batch
            assert sightings[each] >= admit_after
        for each in before.keys() - after.keys():
            sightings[each] = 0


@given(st.integers(1, 20), st.integers(1, 3), BATCHES)
def test_all_rows_that_change_are_told(capacity, admit_after, batches):
    memory, told = Memory(capacity, admit_after), []
    table = memory.open(changes=told.append)
    for batch in batches:
        before = memory.copy()
        table.train_on(tensor(batch))
        changed = (memory.weights != before.weights).any(1) | (memory.state != before.state)
        for name, column in memory.columns.items():
            changed |= column != before.columns[name]
        assert set(changed.nonzero().flatten().tolist()) <= set(torch.cat(told).tolist())
        told.clear()


def test_an_id_gets_its_row_at_the_kth_sighting():
    memory = Memory(64, admit_after=3)
    table = memory.open()
    assert table.train_on(tensor([7, 8, 7])).tolist() == [-1, -1, -1]
    assert table.find(tensor([7, 8])).tolist() == [-1, -1]  # reading is no sighting
    table = memory.copy().open()  # counts are columns, and go on
    assert table.train_on(tensor([8, 7])).tolist() == [-1, 0]
    assert table.train_on(tensor([9, 8, 9, 9])).tolist() == [2, 1, 2, 2]


def test_a_shared_counter_belongs_to_the_last_id():
    columns = {name: torch.zeros(1, dtype=dtype) for name, dtype in columns_of_rows(2).items()}
    candidates = Candidates(HostColumns(columns), lambda rows: None)
    candidates.remember(tensor([3, 4, 5]), tensor([1, 6, 6]))
    assert candidates.counts(tensor([3, 4, 5])).tolist() == [0, 6, 0]
    candidates.forget(tensor([3]))
    assert candidates.counts(tensor([4])).tolist() == [6]
    candidates.remember(tensor([5]), tensor([1]))
    assert candidates.counts(tensor([4, 5])).tolist() == [0, 1]
    candidates.forget(tensor([5]))
    assert candidates.counts(tensor([4, 5])).tolist() == [0, 0]


def test_a_reassigned_row_is_reinitialized():
    memory = Memory(2)
    table = memory.open()
    table.train_on(tensor([1, 2]))
    memory.weights.fill_(5.0), memory.state.fill_(5.0)
    assert table.train_on(tensor([-3])).tolist() == [0]
    assert torch.equal(memory.weights[:1], initial_values(tensor([-3]), DIM, RANGE, SEED, "t"))
    assert memory.state.tolist() == [0.0, 5.0]
    assert memory.weights[1].eq(5.0).all()


def test_of_two_rows_of_an_id_the_newer_one_stays():
    """Rows restored from different moments: 7 was in row 0, lost it, and came back in row 2."""
    memory = Memory(4)
    memory.columns["id"].copy_(tensor([7, 8, 7, 0]))
    memory.columns["last_seen"].copy_(torch.tensor([3, 4, 9, 0]))
    memory.weights[2] = 2.0
    table = memory.open()
    assert table.find(tensor([7, 8, 0])).tolist() == [2, 1, -1]
    assert memory.ids() == {7: 2, 8: 1}
    assert table.train_on(tensor([11])).tolist() == [0]
    assert memory.columns["last_seen"].tolist() == [10, 4, 9, 0]
