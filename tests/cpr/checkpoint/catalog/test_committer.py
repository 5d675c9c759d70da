"""Messages between ranks when saves are committed, merged and verified: no chunks of other ranks."""

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.resolve import find_newest, sweep_and_list
from cpr.checkpoint.format.manifest import ChunkEntry, RowFileEntry
from cpr.checkpoint.format.part import RankPart, tables_of
from cpr.checkpoint.load.shard_loader import load_shards
from tests.cpr.checkpoint.saves import MemoryStorage, commit, make_shard, randomise, save
from tests.cpr.checkpoint.world import committer_of, run_ranks

WORLD_SIZE = 3


def chunks_in(value):
    """Entries of chunks anywhere in what a rank received."""
    if isinstance(value, ChunkEntry):
        yield value
    elif isinstance(value, dict):
        yield from chunks_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from chunks_in(each)
    elif hasattr(value, "__dict__"):
        yield from chunks_in(vars(value))


def shards_of_ranks():
    return [make_shard(rows=rows) for rows in pairwise((0, 40, 80, 100))]


def parts_of(storage, sequence, shards, rows_per_chunk):
    """What each rank has written of a base."""
    parts = []
    for shard in shards:
        manifest = save(storage, sequence, [shard], rows_per_chunk=rows_per_chunk, state={})
        parts.append(RankPart(rows=list(manifest.rows), tables=tables_of([shard])))
    return parts


def commit_on_ranks(rows_per_chunk, waited_s=(0.1, 0.4, 0.2)):
    """Number of bytes that rank 1 received, and the committers of all ranks."""
    storage, shards = MemoryStorage(), shards_of_ranks()
    parts = parts_of(storage, 1, shards, rows_per_chunk)

    def work(group):
        committer = committer_of(group, storage)

        def manifest_of(parts):
            rows = tuple(entry for part in parts for entry in part.rows)
            return commit(MemoryStorage(), 1, tables=parts[0].tables, rows=rows, world_size=WORLD_SIZE)

        manifest, longest_s = committer.commit(
            1, "base", parts[group.rank], None, manifest_of, waited_s[group.rank]
        )
        assert longest_s == max(waited_s)
        assert committer.chain == [manifest]
        return group.received, committer

    results = run_ranks(work, WORLD_SIZE)
    for received, _ in results[1:]:
        assert list(chunks_in(received)) == []
    return len(pickle.dumps(results[1][0])), [committer for _, committer in results]


def test_the_longest_blocked_time_of_all_ranks_is_reported():
    for waited_s in ((0.001, 0.4, 0.0), (0.4, 0.001, 0.0), (0.0, 0.0, 0.4)):
        commit_on_ranks(16, waited_s)


def test_messages_to_other_ranks_do_not_grow_with_the_number_of_chunks():
    few_bytes, _ = commit_on_ranks(rows_per_chunk=40)
    many_bytes, committers = commit_on_ranks(rows_per_chunk=1)
    assert many_bytes < few_bytes + 100  # the files themselves are longer, so their sizes have more digits
    full, *short = [committer.chain[0] for committer in committers]
    assert len(list(chunks_in(full))) == 100
    for each in short:
        assert each.file_digest == full.file_digest  # by which a child calls it
        assert each.num_bytes == full.num_bytes
        assert each == replace(full, rows=tuple(replace(entry, chunks=()) for entry in full.rows))


@pytest.fixture
def chain():
    """Two old bases, then one of three shards and two row saves on it."""
    storage, shards, generator = MemoryStorage(), shards_of_ranks(), torch.Generator().manual_seed(1)
    for shard in shards:
        randomise(shard, generator)
    old = [save(storage, sequence, shards, state={}) for sequence in (0, 1)]
    saves = [save(storage, 2, shards, state={})]
    for sequence in (3, 4):
        ids = {shard.name: torch.arange(shard.row_offset, shard.row_offset + 9) for shard in shards}
        for shard in shards:
            randomise(shard, generator)
        saves.append(save(storage, sequence, shards, saves[-1], ids, rows_per_chunk=4, state={}))
    return storage, old, saves


def loaded(state, storage):
    shard = make_shard()
    load_shards(storage, state, [shard])
    return shard.columns


def test_each_rank_receives_only_its_own_chunks_for_compaction_and_verification(chain):
    storage, old, saves = chain
    before = loaded(find_states(storage)[0][0], storage)

    def work(group):
        committed = [*old, *saves]
        committer = committer_of(
            group, storage, next_sequence=5, merge_after=1, committed=committed, chain=list(saves)
        )
        committer.clean_up()
        return group.received, committer.chain

    results = run_ranks(work, WORLD_SIZE)
    assert not any(isinstance(each, Exception) for each in results)
    (merged,) = results[0][1]
    assert merged.merged == (2, 3, 4)
    assert [chain[0].file_digest for _, chain in results] == [merged.file_digest] * WORLD_SIZE
    for received, chain_ in results[1:]:
        assert list(chunks_in(chain_)) == []
        entries = [entry for entry in rows_in(received) if entry.chunks]
        assert entries, "what it merges and verifies"
        assert len({entry.path for entry in entries}) == 1, "its own part alone"
    states, _ = find_states(storage)
    assert [state.sequence for state in states] == [5, 4, 3, 2], "the old ones went when it was verified"
    for name, column in loaded(states[0], storage).items():
        assert torch.equal(column, before[name]), name


def rows_in(value):
    if isinstance(value, RowFileEntry):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from rows_in(each)


def test_resuming_and_preparing_send_no_chunks_to_other_ranks(chain):
    storage, _, saves = chain

    def work(group):
        state, _ = find_newest(storage, group)
        found = sweep_and_list(storage, group, "run-a", state, ())
        committer = committer_of(group, storage, committed=list(found.committed), chain=list(saves))
        committer.go_back_to(find_states(storage)[0][0], ())
        return group.received, state, found, committer

    for rank, (received, state, found, committer) in enumerate(run_ranks(work, WORLD_SIZE)):
        known = [*chunks_in(state), *chunks_in(found), *chunks_in([committer.committed, committer.chain])]
        assert bool(known) == (rank == 0)
        assert state.newest.file_digest == saves[-1].file_digest
        if rank:
            assert list(chunks_in(received)) == []
