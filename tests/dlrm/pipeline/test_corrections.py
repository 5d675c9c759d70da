"""Which embeddings are sent again after an update."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.pipeline.corrections import Columns, _distinct, _may_be_among, _to_correct
from dlrm.sharding.host_lookup import Reads, _Bags

ROWS = (6, 3, 40)
DIM = 4
FEATURES_OF_RANKS = (2, 3)
"""The rank that is looked at is the second."""


@given(
    rows=st.lists(st.integers(0, 10_000)),
    others=st.lists(st.integers(0, 10_000)),
    dtype=st.sampled_from(["32", "64"]),
)
def test_rows_are_found_without_sorting(rows, others, dtype):
    dtype = getattr(torch, f"int{dtype}")
    rows, others = torch.tensor(rows, dtype=dtype), torch.tensor(others, dtype=dtype)
    found = set(_may_be_among(rows, others).tolist())
    assert found >= {place for place, row in enumerate(rows.tolist()) if row in set(others.tolist())}
    kept, number = _distinct(rows)
    assert torch.equal(rows[kept][number], rows)
    assert kept.numel() <= rows.numel()


def test_equal_rows_are_sent_once():
    kept, number = _distinct(torch.tensor([5, 7, 5, 5, 7, 9]))
    assert kept.numel() == 3
    assert len(set(number.tolist())) == 3
    assert not _may_be_among(torch.arange(100), torch.arange(100, 200)).numel()


def reads_of(lengths, ids, weighted):
    """What a lookup of these bags, feature-major, reads; an id may be any number."""
    bags = _Bags(ROWS, range(len(ROWS)), DIM, torch.float32)
    lengths = torch.tensor(lengths)
    num_samples = lengths.numel() // len(ROWS)
    rows = torch.tensor(ROWS).repeat_interleave(num_samples).repeat_interleave(lengths)
    indices = torch.tensor(ids[: rows.numel()], dtype=torch.int64) % rows
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.linspace(-1, 2, rows.numel()) if weighted else None
    return bags, bags.reads(indices, offsets, weights)


@given(data=st.data(), one_hot=st.booleans(), weighted=st.booleans())
def test_corrected_embeddings_are_those_after_the_update(data, one_hot, weighted):
    batch_sizes = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any))
    num_bags = len(ROWS) * sum(batch_sizes)
    length = st.just(1) if one_hot else st.integers(0, 3)
    batches = []
    for _ in range(2):
        lengths = data.draw(st.lists(length, min_size=num_bags, max_size=num_bags))
        ids = data.draw(st.lists(st.integers(0, 1000), min_size=sum(lengths), max_size=sum(lengths)))
        batches.append(reads_of(lengths, ids, weighted))
    (_, trained), (bags, ahead) = batches
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(sum(ROWS) * DIM, generator=generator)
    before = bags.pool(weights, ahead)
    table = weights.view(-1, DIM)
    table[trained.rows.long().unique()] += 1.0
    after = bags.pool(weights, ahead)
    columns = Columns(dim=DIM, of_ranks=FEATURES_OF_RANKS)
    again, messages, counts = _to_correct(trained, ahead, columns, batch_sizes, rank=1)
    sums = bags.sums(weights, again) if again.starts.numel() else torch.empty(0, DIM)
    assert again.starts.numel() == int(counts[:, 0].sum())
    of_ranks = zip(
        before.split(batch_sizes),
        after.split(batch_sizes),
        sums.split(counts[:, 0].tolist()),
        messages.split((2 * counts[:, 1]).tolist()),
        strict=True,
    )
    for stale, wanted, rows, message in of_ranks:
        output = torch.full((stale.shape[0], sum(FEATURES_OF_RANKS) * DIM), -7.0)  # of both ranks' tables
        own = FEATURES_OF_RANKS[0] * DIM
        output[:, own:] = stale
        places, numbers = message.view(2, -1).long()
        output.view(-1, DIM)[places] = rows[numbers]
        assert torch.equal(output[:, own:], wanted)
        assert bool((output[:, :own] == -7.0).all())


def test_nothing_is_sent_for_other_rows():
    _, trained = reads_of([1] * 6, [0, 0, 0, 0, 0, 0], weighted=False)
    _, ahead = reads_of([1] * 6, [1, 1, 1, 1, 1, 1], weighted=False)
    _, messages, counts = _to_correct(trained, ahead, Columns(dim=DIM, of_ranks=(2, 3)), [1, 1], rank=1)
    assert not messages.numel()
    assert not counts.any()
    nothing = Reads(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), None, None)
    _, messages, counts = _to_correct(nothing, nothing, Columns(dim=DIM, of_ranks=(3, 0)), [1, 1], rank=1)
    assert counts.shape == (2, 2)
    assert not counts.any()
