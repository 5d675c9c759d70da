"""Table shards without a model, in a segment or next to it."""

import torch

from cpr.shards import TableShard

RUN = {"session_id": "session", "rank": 1, "world_size": 2, "generation": 3}
ROWS, COLS = 40, 8


def make_shard(segment=None, fill=1.0, fqn="model.t", rows=ROWS):
    """A shard with state by row and by element, in the segment's memory if one is given."""

    def memory(name, numel):
        return segment.region(f"{fqn}-{name}", torch.float32, numel) if segment else torch.empty(numel)

    return TableShard(
        table_fqn=fqn,
        table_shape=(3 * rows, 2 * COLS),
        row_offset=rows,
        col_offset=COLS,
        replicated=False,
        weights=memory("weights", rows * COLS).view(rows, COLS).fill_(fill),
        optimizer_state={
            "sum": memory("sum", rows).fill_(fill + 1),
            "exp_avg": memory("avg", rows * COLS).view(rows, COLS).fill_(fill + 2),
        },
    )


def assert_same(shards, held):
    """Whether held shards are those, in place and content."""
    by_extent = {each.extent: each for each in held}
    assert len(by_extent) == len(shards)
    for shard in shards:
        other = by_extent[shard.extent]
        assert other.columns.keys() == shard.columns.keys()
        for name, tensor in shard.columns.items():
            assert torch.equal(other.columns[name], tensor), (shard.name, name)


def crash_and_find(home, segment):
    """What the next worker finds after this one died."""
    segment.release()
    (found,), refused = home.find()
    assert refused == []
    assert found.claim()
    return found
