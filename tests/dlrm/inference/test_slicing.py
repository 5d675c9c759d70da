"""Samples are sliced by the values of a feature, and by how often training saw their ids."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from data.dataset import read_manifest
from data.loader import DataLoader, LoaderConfig
from dlrm.inference.slicing import MOST, ByFrequency, ByValue, count_ids, names_of_ids

CPU = torch.device("cpu")


def bags_of(batch, feature):
    """The ids of each real sample."""
    return [set(bag.tolist()) for bag in batch.sparse[feature].to_dense()[: batch.num_valid]]


def pairs_of(slicing, batch):
    samples, slices = slicing.assign(batch)
    return sorted(zip(samples.tolist(), [slicing.names[each] for each in slices.tolist()], strict=True))


@pytest.fixture(params=[False, True], ids=["one-hot", "multi-hot"])
def batch(request, make_batch):
    """One whose last samples are padding."""
    return replace(make_batch(64, seed=1, multi_hot=request.param), num_valid=60)


def test_a_sample_is_in_the_slice_of_each_of_its_values_once(batch):
    counts = torch.zeros(50, dtype=torch.int32)
    slicing = ByValue("cat_0", counts, {7: "seven", 3: "three", 9: "nine"})
    expected = []
    for sample, ids in enumerate(bags_of(batch, "cat_0")):
        named = {"seven" if each == 7 else {3: "three", 9: "nine"}.get(each, "(all others)") for each in ids}
        expected += [(sample, name) for name in named or {"(no id)"}]
    assert pairs_of(slicing, batch) == sorted(expected)


def test_the_rarest_id_of_a_sample_counts(batch):
    generator = torch.Generator().manual_seed(0)
    features = {"cat_0": 50, "cat_2": 300}
    exponents = {name: torch.rand(rows, generator=generator) * 5 for name, rows in features.items()}
    counts = {name: (10**each).int() - 1 for name, each in exponents.items()}
    slicing = ByFrequency("frequency", counts)
    bags = [bags_of(batch, name) for name in features]
    expected = []
    for sample, of_features in enumerate(zip(*bags, strict=True)):
        seen = [
            counts[name][each].item() for name, ids in zip(features, of_features, strict=True) for each in ids
        ]
        least = min(seen, default=None)
        if least is None:
            name = "(no id)"
        elif least == 0:
            name = "never"
        else:
            begin = 10 ** (len(str(least)) - 1)
            name = f"{begin:,} to {10 * begin - 1:,} times" if begin < 10_000 else "10,000 times or more"
        expected.append((sample, name))
    assert pairs_of(slicing, batch) == expected


def test_ids_are_counted_as_often_as_they_occur(world_of_one, small_dataset, monkeypatch):
    manifest = read_manifest(str(small_dataset)).on_days([0, 1])
    counted = count_ids(str(small_dataset), manifest, ["cat_2", "cat_8"], CPU)
    assert {name: len(each) for name, each in counted.items()} == {
        each.name: each.rows for each in manifest.features if each.name in {"cat_2", "cat_8"}
    }
    loader = DataLoader(str(small_dataset), LoaderConfig(batch_size=64, drop_last=False), days=[0, 1])
    for name, counts in counted.items():
        found = Counter(each for batch in loader for each in batch.sparse[name].values().tolist())
        assert {id: times for id, times in enumerate(counts.tolist()) if times} == found
    loader.close()
    assert MOST * 2000 < 2**31  # ranks
    assert names_of_ids(str(small_dataset), manifest, "cat_8", [2, 1]) == {2: "id 2", 1: "id 1"}
