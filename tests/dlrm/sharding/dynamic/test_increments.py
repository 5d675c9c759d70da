"""A follower that applies increments has exactly what a full export has, whatever happened in between."""

import json
from itertools import count

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cpr.checkpoint.catalog.chain import own_states
from cpr.checkpoint.interop import full_model
from cpr.checkpoint.interop.export import export
from tests.cpr.checkpoint.followers import apply, full, read, tombstones
from tests.cpr.checkpoint.saves import MemoryStorage, make_shard, save
from tests.cpr.checkpoint.world import committer_of, run_ranks
from tests.dlrm.sharding.dynamic.test_table import DIM, FEW_IDS, Memory

CAPACITY, STATIC_ROWS = 10, 12
LAYOUTS = {  # of the static table, on several numbers of ranks
    "whole": [((0, STATIC_ROWS), (0, DIM))],
    "rows": [((0, 5), (0, DIM)), ((5, STATIC_ROWS), (0, DIM))],
    "columns": [((0, STATIC_ROWS), (0, 1)), ((0, STATIC_ROWS), (1, DIM))],
}
KEYS = {"model.d": "id", "model.s": "row"}

batches = st.lists(FEW_IDS, min_size=1, max_size=8)
rows_of = st.sets(st.integers(0, STATIC_ROWS - 1), max_size=6)
events = st.one_of(
    st.tuples(st.just("train"), batches, rows_of),
    st.tuples(st.just("train"), batches, rows_of),
    st.tuples(st.just("save rows"), st.sets(st.integers(0, STATIC_ROWS - 1)), st.booleans()),
    st.tuples(st.just("save all"), st.sampled_from(sorted(LAYOUTS))),
    st.tuples(st.just("follow")),
)
"""A step, with the ids of the dynamic table and the rows of the static one; a save of some rows, and whether
those of evicted ids are among them, as `Prioritizer` has them; a save of all rows, on other ranks; a step of
the follower."""


class Run:
    """Trains a dynamic and a static table, and saves them, with compaction and retention."""

    def __init__(self, admit_after):
        self.storage, self.memory = MemoryStorage(), Memory(CAPACITY, admit_after)
        self.evicted = set()
        self.table = self.memory.open(evictions=lambda rows: self.evicted.update(rows.tolist()))
        self.static = torch.zeros(STATIC_ROWS, DIM), torch.zeros(STATIC_ROWS)
        self.step, self.committed, self.chain, self.next = 0, [], [], 0

    def train(self, ids, static_rows):
        self.step += 1
        rows = self.table.train_on(torch.tensor(ids)).unique()
        for values in (self.memory.weights, self.memory.state):
            values[rows[rows >= 0]] += self.step / 8
        for values in self.static:
            values[sorted(static_rows)] += self.step / 8

    def shards(self, layout):
        fields = {"states": {}, "shape": (CAPACITY, DIM)}
        dynamic = make_shard("model.d", **{**fields, "weights": self.memory.weights})
        dynamic.optimizer_state.update(sum=self.memory.state, **self.memory.columns)
        weights, sums = self.static
        static = []
        for rows, cols in LAYOUTS[layout]:
            shard = make_shard("model.s", (STATIC_ROWS, DIM), rows, cols)
            shard.weights.copy_(weights[slice(*rows), slice(*cols)])
            shard.optimizer_state["sum"].copy_(sums[slice(*rows)])
            static.append(shard)
        return [dynamic, *static]

    def save_all(self, layout):
        self.layout = layout
        self._save(None, None)
        self.evicted.clear()

    def save_rows(self, chosen, with_evicted):
        """Different rows of each part of the static table, as its trackers choose alone."""
        dynamic, *static = self.shards(self.layout)
        rows = {row for row in chosen if row < CAPACITY} | (self.evicted if with_evicted else set())
        ids = {dynamic.name: torch.tensor(sorted(rows), dtype=torch.int64)}
        for number, shard in enumerate(static):
            own = {(row + number) % STATIC_ROWS for row in chosen}
            own = [row for row in sorted(own) if 0 <= row - shard.row_offset < shard.num_rows]
            ids[shard.name] = torch.tensor(own, dtype=torch.int64)
        self._save(self.chain[-1], ids)
        if with_evicted:
            self.evicted.clear()

    def _save(self, parent, ids):
        made = save(
            self.storage,
            self.next,
            self.shards(self.layout),
            parent,
            ids,
            rows_per_chunk=3,
            state={},
            step=self.step,
            world_size=len(LAYOUTS[self.layout]),
        )
        self.committed, self.chain = [*self.committed, made], [*(self.chain if parent else ()), made]

        def clean_up(group):
            committer = committer_of(
                group,
                self.storage,
                merge_after=2,
                next_sequence=self.next + 1,
                committed=self.committed,
                chain=self.chain,
            )
            committer.clean_up()
            return committer

        (committer,) = run_ranks(clean_up, 1)
        self.next = committer.next_sequence
        self.committed, self.chain = committer.committed, committer.chain


class Follower:
    """Keeps tables by key; knows the save that they are from."""

    def __init__(self, storage, folder):
        self.storage, self.folder, self.names = storage, folder, count()
        self.num_increments = 0
        self.start_over()

    def start_over(self):
        out = self.new_folder()
        export(self.storage, "parquet", out)
        self.tables, notes = full(out), json.loads((out / "cpr-export.json").read_text())
        self.step, self.sequence = notes["step"], notes["sequence"]

    def new_folder(self):
        return self.folder / str(next(self.names))

    def follow(self):
        """Take an increment, or a full export if there is none; checks all that is promised of both."""
        states, _ = own_states(self.storage)
        out = self.new_folder()
        if self.step not in {state.step for state in states}:
            with pytest.raises(ValueError, match="make a full export"):
                export(self.storage, "parquet", out, since=self.step)
            assert not out.exists()
            self.start_over()
            return
        done = export(self.storage, "parquet", out, since=self.step)
        manifest = json.loads((out / "cpr-increment.json").read_text())
        assert manifest["since"]["step"] == self.step
        if self.sequence not in manifest["since"]["sequences"]:
            assert self.sequence not in {state.sequence for state in states}
            self.start_over()
            return
        self.num_increments += 1
        is_only = len(manifest["since"]["sequences"]) == 1
        for fqn, table in self.tables.items():
            rows, gone, key = read(out / "rows" / fqn), tombstones(out, fqn), KEYS[fqn]
            told = {"key": key, "rows": len(rows), "tombstones": len(gone)}
            assert manifest["tables"][fqn] == told
            keys = [row[key] for row in rows]
            assert len({*keys, *gone}) == len(keys) + len(gone)
            if is_only:  # otherwise it is also for who has another state of the step
                assert set(gone) <= table.keys()
                assert all(table.get(row[key]) != row for row in rows)
        apply(out, self.tables)
        self.step, self.sequence = manifest["to"]["step"], manifest["to"]["sequence"]
        assert self.sequence == done.state.sequence == states[0].sequence
        whole = self.new_folder()
        export(self.storage, "parquet", whole)
        assert self.tables == full(whole)


def play(history, admit_after, folder):
    run = Run(admit_after)
    run.save_all("whole")
    follower = Follower(run.storage, folder)
    for kind, *what in history:
        if kind == "train":
            run.train(*what)
        elif kind == "save rows":
            run.save_rows(*what)
        elif kind == "save all":
            run.save_all(*what)
        else:
            follower.follow()
    follower.follow()
    return run, follower


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """So that tables pass by in several windows."""
    monkeypatch.setattr(full_model, "WINDOW_BYTES", 200)


@given(st.lists(events, max_size=25), st.sampled_from([1, 2]))
@settings(max_examples=40, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
def test_increments_add_up_to_a_full_export(tmp_path_factory, history, admit_after):
    play(history, admit_after, tmp_path_factory.mktemp("follower"))


ALL = set(range(STATIC_ROWS))
FIRST, SECOND = list(range(100, 100 + CAPACITY)), list(range(200, 200 + CAPACITY))


def train(*ids):
    return ("train", list(ids), {0})


def test_ids_that_are_evicted_and_replaced_in_one_row_are_tombstones(tmp_path):
    history = [train(*FIRST), ("save rows", ALL, True), ("follow",), train(*SECOND), ("save rows", ALL, True)]
    _, follower = play(history, 1, tmp_path)
    assert tombstones(tmp_path / "3", "model.d") == FIRST
    assert sorted(follower.tables["model.d"]) == SECOND


def test_an_id_that_returns_in_another_row_is_no_tombstone(tmp_path):
    """Although the row that it had is another id's."""
    moved = [train(*SECOND), train(FIRST[-1], *SECOND[1:])]
    history = [train(*FIRST), ("save rows", ALL, True), ("follow",), *moved, ("save rows", ALL, True)]
    run, follower = play(history, 1, tmp_path)
    assert run.memory.ids()[FIRST[-1]] != CAPACITY - 1
    assert tombstones(tmp_path / "3", "model.d") == FIRST[:-1]
    assert FIRST[-1] in follower.tables["model.d"]


def test_evicted_ids_leave_the_follower_before_their_successors_arrive(tmp_path):
    """A row save that chooses no row: it holds those of evicted ids, with whatever they have now."""
    history = [
        train(*FIRST),
        ("save rows", ALL, True),
        ("follow",),
        train(*SECOND[:3]),
        ("save rows", set(), True),
    ]
    _, follower = play(history, 1, tmp_path)
    assert sorted(follower.tables["model.d"]) == sorted([*FIRST[3:], *SECOND[:3]])


@pytest.mark.parametrize("full_saves", [0, 1])
def test_increments_reach_across_compactions_and_full_saves(tmp_path, full_saves):
    """While retention keeps the state that the follower has."""
    first = [train(*FIRST), ("save rows", ALL, True), ("follow",), train(7)]
    row_saves = [("save rows", {1, 2}, True), train(*SECOND[:4])] * (1 if full_saves else 3)
    run, follower = play([*first, *row_saves, *[("save all", "rows")] * full_saves], 1, tmp_path)
    assert any(save.merged for save in run.committed) != bool(full_saves)
    assert follower.num_increments == 2


def test_what_retention_has_deleted_cannot_be_followed(tmp_path):
    history = [train(*FIRST), *[("save all", "whole"), train(7)] * 3]
    _, follower = play(history, 1, tmp_path)
    assert follower.num_increments == 0
