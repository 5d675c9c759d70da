"""Trackers of small synthetic groups without a model, and random sequences of events."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from cpr.priority.config import PriorityConfig
from cpr.priority.prioritizer import TRACKERS
from cpr.priority.tracker import TrackedGroup, TrackedTable
from cpr.shards.lookups import LookupLayout, Lookups
from cpr.shards.shard import TableShard

CPU = torch.device("cpu")
TABLE_ROWS = (9, 5, 6)
PRIORITISED = (0, 2)
"""Prioritised tables of `TABLE_ROWS`; the other one is saved whole."""


def make_layout(table_rows=TABLE_ROWS):
    """One feature for each table, and another for the first."""
    return LookupLayout(table_rows=table_rows, feature_tables=(*range(len(table_rows)), 0), device=CPU)


def make_shard(rows, name="table", dtype=torch.float32):
    return TableShard(
        table_fqn=name,
        table_shape=(rows, 2),
        row_offset=0,
        col_offset=0,
        replicated=False,
        weights=torch.zeros(rows, 2, dtype=dtype),
        optimizer_state={},
    )


def zeros(name, dtype, numel):
    """Memory that is mapped on first use, as most of a backlog is never used."""
    return torch.from_numpy(np.zeros(numel, torch.empty(0, dtype=dtype).numpy().dtype))


def make_group(table_rows=TABLE_ROWS, prioritised=PRIORITISED, allocate=zeros, dtype=torch.float32, **config):
    config = PriorityConfig(**config)
    layout = make_layout(table_rows)
    return TrackedGroup(
        tables=[
            TrackedTable(
                shard=make_shard(rows, f"table{number}", dtype),
                first_row=first,
                num_rows=rows,
                budget=math.ceil(config.ratio * rows) if number in prioritised else 0,
            )
            for number, (rows, first) in enumerate(zip(table_rows, layout.first_rows, strict=False))
        ],
        layout=layout,
        name="group",
        config=config,
        allocate=allocate,
    )


def make_tracker(**options):
    group = make_group(**options)
    return TRACKERS[group.config.scheme](group)


def make_lookups(ids_of_features, layout=None):
    """Lookups of lists of ids, one for each feature."""
    layout = layout or make_layout()
    ends = torch.tensor([0, *(len(ids) for ids in ids_of_features)]).cumsum(0)
    ids = torch.tensor([each for ids in ids_of_features for each in ids], dtype=torch.int64)
    return Lookups(layout=layout, ids=ids, ends=ends)


def rows_of_table(ids_of_features, table, layout=None):
    """The looked-up rows of one table, in order."""
    tables = (layout or make_layout()).feature_tables
    return [
        each for ids, number in zip(ids_of_features, tables, strict=True) if number == table for each in ids
    ]


batches = st.tuples(
    *(st.lists(st.integers(0, rows - 1), max_size=12) for rows in (*TABLE_ROWS, TABLE_ROWS[0]))
)
"""Ids for the features of `make_layout`."""

events = st.one_of(
    st.tuples(st.just("see"), batches),
    st.tuples(st.just("save"), batches, st.booleans()),
    st.tuples(st.just("forget"), st.sampled_from(PRIORITISED), st.none() | st.sets(st.integers(0, 5))),
)
"""A batch; a save, with the lookups during it and whether it is committed; a restore."""


def play(tracker, oracle, history):
    """Apply events to a tracker and to an oracle that must agree."""
    for kind, *what in history:
        if kind == "see":
            tracker.see(make_lookups(what[0]))
            oracle.see(what[0])
        elif kind == "forget":
            table, rows = what
            tracker.forget(table, None if rows is None else torch.tensor(sorted(rows), dtype=torch.int64))
            oracle.forget(table, rows)
        else:
            meanwhile, is_committed = what
            chosen = {table: tracker.choose(table) for table in PRIORITISED}
            expected = {table: oracle.choose(table) for table in PRIORITISED}
            assert {table: rows.tolist() for table, rows in chosen.items()} == expected
            tracker.see(make_lookups(meanwhile))
            oracle.see_while_saving(meanwhile)
            for table, rows in chosen.items():
                (tracker.confirm if is_committed else tracker.take_back)(table, rows)
            oracle.end_save(is_committed)
