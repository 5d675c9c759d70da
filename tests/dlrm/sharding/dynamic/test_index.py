"""The index against a dict, and hashes against their definition."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.sharding.dynamic.index import IdIndex, initial_values, mix

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(INT64 | st.sampled_from([0, -1, 2**63 - 1, -(2**63)]), unique=True, max_size=40)


def splitmix(number):
    """SplitMix64's finalizer in whole numbers, from its definition."""
    word = number % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return word - 2**64 if word >= 2**63 else word


@given(st.lists(INT64, min_size=1))
def test_numbers_are_mixed_as_splitmix_does(numbers):
    assert mix(torch.tensor(numbers)).tolist() == [splitmix(number) for number in numbers]


@given(IDS, IDS, st.integers(0, 30), st.randoms())
def test_added_ids_are_found_and_no_others(ids, others, spare, random):
    rows = list(range(len(ids) + spare))
    random.shuffle(rows)
    column = torch.full((max(len(rows), 1),), 7)  # rows that are not indexed hold ids, too
    given_rows = torch.tensor(rows[: len(ids)], dtype=torch.int64)
    column[given_rows] = torch.tensor(ids, dtype=torch.int64)
    half = len(ids) // 2
    index = IdIndex(column, given_rows[:half])
    index.add(given_rows[half:])
    row_of = dict(zip(ids, given_rows.tolist(), strict=True))
    asked = [*ids, *others, *ids]
    found = index.find(torch.tensor(asked, dtype=torch.int64)).tolist()
    assert found == [row_of.get(each, -1) for each in asked]


def test_initial_values_are_those_of_seed_table_and_id():
    ids = torch.tensor([5, -(2**63), 2**63 - 1, 0, 5])
    values = initial_values(ids, 8, (-0.5, 0.5), seed=1, table="t")
    assert values.dtype == torch.float32
    assert torch.equal(values[0], values[4])
    assert torch.equal(initial_values(ids.flip(0), 8, (-0.5, 0.5), seed=1, table="t").flip(0), values)
    assert len({tuple(row) for row in values.tolist()}) == 4
    assert not torch.equal(initial_values(ids, 8, (-0.5, 0.5), seed=2, table="t"), values)
    assert not torch.equal(initial_values(ids, 8, (-0.5, 0.5), seed=1, table="u"), values)


def test_initial_values_are_uniform():
    values = initial_values(torch.arange(20_000), 4, (-0.25, 0.25), seed=3, table="t")
    assert values.min() >= -0.25
    assert values.max() < 0.25
    for column in values.T:
        shares = torch.histc(column, 10, -0.25, 0.25) / len(column)
        assert (shares - 0.1).abs().max() < 0.01  # more than four standard deviations
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.03
