"""Batches, positions and errors of the data loader."""

import json

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.loader import DataLoader, LoaderConfig

KINDS = ("one", "bag", "one")


@pytest.fixture(scope="module")
def one_hot(tmp_path_factory, make_dataset):
    folder = tmp_path_factory.mktemp("one_hot")
    make_dataset(folder)
    return str(folder)


@pytest.fixture(scope="module")
def multi_hot(tmp_path_factory, make_dataset):
    folder = tmp_path_factory.mktemp("multi_hot")
    make_dataset(folder, kinds=KINDS)
    return str(folder)


def config(**changes):
    return LoaderConfig(**{"batch_size": 8, "window_batches": 3, "seed": 5, **changes})


def numbers(batches):
    """Row numbers of the valid samples."""
    return [int(row) for batch in batches for row in batch.dense[: batch.num_valid, 0]]


def expected_bag(kind, row, rows):
    return [row % rows] if kind == "one" else [(row + k) % rows for k in range(row % 4)]


@pytest.mark.parametrize("kinds", [("one", "one", "one"), KINDS])
def test_batches_hold_what_the_files_hold(request, kinds):
    folder = request.getfixturevalue("one_hot" if kinds != KINDS else "multi_hot")
    loader = DataLoader(folder, config())
    batches = list(loader)
    assert len(batches) == len(loader) == 12
    for batch in batches:
        rows = batch.dense[:, 0].int().tolist()
        assert batch.dense.dtype == batch.labels.dtype == torch.float32
        assert batch.dense[:, 1].tolist() == [2 * row for row in rows]
        assert batch.labels.tolist() == [float(row % 3 == 0) for row in rows]
        assert batch.num_valid == 8
        assert batch.sparse.keys() == ["cat_0", "cat_1", "cat_2"]
        for feature, kind in zip(loader.manifest.features, kinds, strict=True):
            bags = [bag.tolist() for bag in batch.sparse[feature.name].to_dense()]
            assert bags == [expected_bag(kind, row, feature.rows) for row in rows]
    assert len(set(numbers(batches))) == 96


@pytest.mark.parametrize("folder", ["one_hot", "multi_hot"])
def test_precomputed_fields_are_those_torchrec_computes(request, folder):
    batch = next(iter(DataLoader(request.getfixturevalue(folder), config())))
    sparse = batch.sparse
    assert sparse.values().dtype == sparse.lengths().dtype == sparse.offsets().dtype == torch.int64
    plain = KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=sparse.lengths())
    assert sparse.stride() == plain.stride() == 8
    assert sparse._offsets.tolist() == plain.offsets().tolist()
    assert sparse._length_per_key == plain.length_per_key()
    assert sparse._offset_per_key == plain.offset_per_key()
    assert sparse._index_per_key == plain._key_indices()
    assert sparse.values().is_contiguous()


def test_an_epoch_shuffles_within_windows_and_differs_from_the_next(one_hot):
    loader = DataLoader(one_hot, config())
    first, second = numbers(loader), numbers(loader)
    assert sorted(first) == sorted(second) == list(range(96))
    assert first != second
    for begin in range(0, 96, 24):
        assert sorted(first[begin : begin + 24]) == list(range(begin, begin + 24))
    assert numbers(DataLoader(one_hot, config())) == first


def test_days_are_read_in_time_order(one_hot):
    loader = DataLoader(one_hot, config(shuffle=False, window_batches=1), days=[1])
    assert numbers(loader) == list(range(70, 94))
    assert loader.manifest.num_rows == 30


def test_ranks_share_an_epoch_in_equal_numbers_of_batches(one_hot):
    loaders = [DataLoader(one_hot, config(batch_size=7), rank=rank, world_size=3) for rank in range(3)]
    batches = [list(loader) for loader in loaders]
    assert [len(of_rank) for of_rank in batches] == [len(loader) for loader in loaders] == [4, 4, 4]
    assert sorted(row for of_rank in batches for row in numbers(of_rank)) == list(range(84))


def test_seldp_ranks_read_chunks_of_their_own_that_rotate(one_hot):
    loaders = [DataLoader(one_hot, config(order="seldp"), rank=rank, world_size=4) for rank in range(4)]
    chunks = [set(range(24 * chunk, 24 * chunk + 24)) for chunk in range(4)]
    for epoch in range(4):
        for rank, loader in enumerate(loaders):
            assert loader.epoch == epoch
            assert set(numbers(loader)) == chunks[(rank + epoch) % 4]


def test_evaluation_sees_every_sample_once_in_full_batches(one_hot):
    loaders = [DataLoader(one_hot, config(drop_last=False), rank=rank, world_size=5) for rank in range(5)]
    batches = [list(loader) for loader in loaders]
    assert {len(of_rank) for of_rank in batches} == {len(loaders[0])} == {3}
    assert all(len(batch.labels) == 8 for of_rank in batches for batch in of_rank)
    assert sorted(row for of_rank in batches for row in numbers(of_rank)) == list(range(100))


def test_a_rank_may_have_no_valid_sample_in_the_padded_batch(tmp_path, make_dataset):
    make_dataset(tmp_path, row_groups=((2,),))
    last = [
        list(DataLoader(str(tmp_path), config(drop_last=False), rank=r, world_size=3))[-1] for r in range(3)
    ]
    assert sorted(batch.num_valid for batch in last) == [0, 1, 1]
    assert all(torch.isfinite(batch.dense).all() and len(batch.labels) == 8 for batch in last)


@pytest.mark.parametrize("order", ["stripes", "seldp"])
@pytest.mark.parametrize("stop", [0, 1, 3, 7, 11, 12])
def test_resuming_gives_bit_identical_batches(one_hot, stop, order):
    whole = list(DataLoader(one_hot, config(order=order)))
    loader = DataLoader(one_hot, config(order=order))
    batches = iter(loader)
    before = [next(batches) for _ in range(stop)]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = DataLoader(one_hot, config(order=order))
    resumed.load_state_dict(state)
    assert resumed.steps_left == 12 - stop
    for batch, same in zip(before + list(resumed), whole, strict=True):
        assert torch.equal(batch.dense, same.dense)
        assert torch.equal(batch.labels, same.labels)
        assert torch.equal(batch.sparse.values(), same.sparse.values())
        assert torch.equal(batch.sparse.lengths(), same.sparse.lengths())
    assert resumed.epoch == 1


@pytest.mark.parametrize(
    "orders", [("stripes",) * 3, ("seldp",) * 3, ("stripes", "seldp", "stripes")], ids="-".join
)
def test_second_resume_in_one_epoch_at_other_world_sizes_loses_nothing(one_hot, orders):
    seen, state = [], None
    for world_size, steps, order in [(2, 2, orders[0]), (3, 1, orders[1]), (1, None, orders[2])]:
        states = []
        for rank in range(world_size):
            of_rank = {"rank": rank, "world_size": world_size}
            loader = DataLoader(one_hot, config(batch_size=5, order=order), **of_rank)
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            count = loader.steps_left if steps is None else steps
            seen += numbers([next(batches) for _ in range(count)])
            states.append(loader.state_dict())
            loader.close()
        assert all(other == states[0] for other in states)
        state = states[0]
    assert sorted(seen) == list(range(100))


def test_position_ignores_prefetched_batches(one_hot):
    loader = DataLoader(one_hot, config(prefetch=12))
    batches = iter(loader)
    next(batches)
    next(batches)
    assert [phase["steps"] for phase in loader.state_dict()["phases"]] == [2]


def test_upcoming_batches_are_shown_and_not_taken(one_hot):
    """A batch that was looked at, but not yielded, is read again after a resume."""
    plain, loader = list(DataLoader(one_hot, config())), DataLoader(one_hot, config())
    assert loader.upcoming(2) == []  # nothing is being read
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch)
        shown = loader.upcoming(number % 4)
        assert len(shown) == min(number % 4, len(plain) - number - 1)
        assert numbers(shown) == numbers(plain[number + 1 : number + 1 + len(shown)])
        assert loader.state_dict()["phases"][0]["steps"] == number + 1
        if number == 5:
            break
    resumed = DataLoader(one_hot, config())
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed) == numbers(loader) == numbers(plain[6:])
    batches = iter(loader)
    assert next(batches) is not None
    loader.upcoming(3)
    assert len(numbers(iter(loader))) == 8 * (len(plain) - 1)


@pytest.mark.parametrize("order", ["stripes", "seldp"])
@pytest.mark.parametrize("folder", ["one_hot", "multi_hot"])
def test_ranks_change_the_sizes_of_their_batches_and_lose_nothing(request, folder, order):
    """Within an epoch and at its end, while batches are shown ahead, and across a restart."""
    folder = request.getfixturevalue(folder)
    changes = {1: (7, 5), 4: (2, 10), 5: (6, 6), 6: (11, 1)}

    def read(rank, state=None, stop=99):
        loader = DataLoader(folder, config(batch_size=6, order=order), rank=rank, world_size=2)
        if state is not None:
            loader.load_state_dict(state)
        done, batches = 8 * loader.epoch + 8 - loader.steps_left, []
        while loader.epoch < 2 and done < stop:
            for batch in loader:
                batches.append(batch)
                done += 1
                loader.upcoming(2)
                if done in changes:
                    loader.resize(changes[done])
                if done == stop:
                    break
        return batches, json.loads(json.dumps(loader.state_dict()))

    whole = [read(rank)[0] for rank in range(2)]
    sizes = [[len(batch.labels) for batch in batches] for batches in whole]
    assert sizes[0] == [6, 7, 7, 7, 2, 6, 11, 11] + [11] * 8
    assert all(first + second == 12 for first, second in zip(*sizes, strict=True))
    for epoch in range(2):
        seen = numbers([batch for batches in whole for batch in batches[8 * epoch : 8 * epoch + 8]])
        assert len(set(seen)) == len(seen) == 96
    for batch in (each for batches in whole for each in batches):
        assert len(batch.labels) == batch.num_valid == batch.sparse.stride()
    for stop in (1, 2, 4, 5, 6, 8, 11):
        for rank in range(2):
            before, state = read(rank, stop=stop)
            after, _ = read(rank, state)
            assert list(map(numbers, [[each] for each in before + after])) == [
                numbers([each]) for each in whole[rank]
            ]


def test_sizes_of_batches_that_do_not_fit_are_refused_and_forgotten_at_another_world_size(one_hot):
    loader = DataLoader(one_hot, config(batch_size=6), rank=1, world_size=2)
    for sizes in ((6, 6, 0), (12, 0), (6, 7), (12,), (-1, 13)):
        with pytest.raises(ValueError, match="2 ranks with at least one sample each and 12 together"):
            loader.resize(sizes)
    loader.resize((4, 8))
    assert {len(batch.labels) for batch in loader} == {8}
    for shape in ({"world_size": 3}, {"world_size": 2, "batch_size": 5}):
        other = DataLoader(one_hot, config(batch_size=shape.pop("batch_size", 4)), **shape)
        other.load_state_dict(loader.state_dict())
        assert {len(batch.labels) for batch in other} == {other.config.batch_size}


def test_new_iterator_continues_at_the_position(one_hot):
    loader, seen = DataLoader(one_hot, config()), []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 5:
            break
    seen += list(loader)
    assert numbers(seen) == numbers(DataLoader(one_hot, config()))


def test_state_after_the_last_batch_starts_the_next_epoch(one_hot):
    loader = DataLoader(one_hot, config())
    list(loader)
    second = numbers(loader)
    resumed = DataLoader(one_hot, config())
    list(resumed)
    state = resumed.state_dict()
    assert (state["epoch"], state["phases"]) == (1, [])
    other = DataLoader(one_hot, config())
    other.load_state_dict(state)
    assert numbers(other) == second


@pytest.mark.parametrize(
    ("change", "name"),
    [({"seed": 6}, "seed"), ({"shuffle": False}, "shuffle"), ({"days": [0]}, "num_rows")],
)
def test_position_of_other_data_is_refused(one_hot, change, name):
    days = change.pop("days", None)
    state = DataLoader(one_hot, config()).state_dict()
    with pytest.raises(ValueError, match=name):
        DataLoader(one_hot, config(**change), days=days).load_state_dict(state)


def test_a_position_in_other_files_with_as_many_rows_is_refused(tmp_path, one_hot, make_dataset):
    make_dataset(tmp_path, row_groups=((30, 40), (30,)))
    state = DataLoader(str(tmp_path), config()).state_dict()
    with pytest.raises(ValueError, match="parts_digest"):
        DataLoader(one_hot, config()).load_state_dict(state)


def test_too_few_rows_for_one_step_is_an_error(one_hot):
    with pytest.raises(ValueError, match=r"100 samples.*fewer than one step of 4 ranks x 32"):
        DataLoader(one_hot, config(batch_size=32), world_size=4)
    with pytest.raises(ValueError, match="fewer than one step"):  # before a batch is allocated
        DataLoader(one_hot, config(batch_size=2**50))
    assert len(DataLoader(one_hot, config(batch_size=32, drop_last=False), world_size=4)) == 1


def test_position_without_an_order_is_one_of_stripes(one_hot):
    loader = DataLoader(one_hot, config())
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    del state["phases"][0]["order"]
    resumed = DataLoader(one_hot, config())
    resumed.load_state_dict(state)
    assert numbers(resumed) == numbers(batches)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"batch_size": "5"},
        {"window_batches": 0},
        {"prefetch": 0},
        {"seed": -1},
        {"seed": 1.5},
        {"order": "random"},
    ],
)
def test_bad_configuration_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        config(**change)


def test_bad_rank_is_refused(one_hot):
    with pytest.raises(ValueError, match="rank 2"):
        DataLoader(one_hot, config(), rank=2, world_size=2)


def test_each_row_group_is_decoded_once_by_a_rank_that_reads_alone(one_hot):
    class Counting:
        def __init__(self, inner):
            self.inner, self.reads = inner, []

        def read(self, part, row_group):
            self.reads.append((part.path, row_group))
            return self.inner.read(part, row_group)

    loader = DataLoader(one_hot, config())
    counting = Counting(loader._source)
    list(DataLoader(one_hot, config(), source=counting))
    assert len(counting.reads) == len(set(counting.reads)) == 3
