import numpy as np
import pytest
import torch

from data.dataset import Feature
from experiments.emulation import data as emulation_data
from experiments.emulation.data import Ids, default_dataset, prioritised_tables, skewed_dataset, slice_of
from experiments.harness.workload import one_hot

NAMES = [f"cat_{number}" for number in range(26)]
FEATURES = [Feature(name=name, rows=3 + 5 * number) for number, name in enumerate(NAMES)]


class Made:
    """As much of a batch as matters here."""

    def __init__(self, seed, size=64):
        rng = np.random.default_rng(seed)
        ids = np.stack([rng.integers(0, feature.rows, size) for feature in FEATURES])
        self.ids = torch.from_numpy(ids)
        self.sparse = one_hot(ids.copy())


def renamed(batch):
    return batch.sparse.values().view(26, -1)


def test_ids_of_a_table_are_renamed_one_to_one_and_the_same_every_time():
    batches = [Made(seed) for seed in range(40)]
    for _ in Ids(FEATURES).training(batches):
        pass
    for table, feature in enumerate(FEATURES):
        pairs = {
            (int(old), int(new))
            for batch in batches
            for old, new in zip(batch.ids[table], renamed(batch)[table], strict=True)
        }
        old, new = (set(side) for side in zip(*pairs, strict=True))
        assert len(old) == len(new) == len(pairs) == feature.rows
        assert max(new) == feature.rows - 1
    (again,) = Ids(FEATURES).training([Made(7)])
    assert torch.equal(renamed(again), renamed(batches[7]))


def test_popular_ids_are_spread():
    first = torch.arange(20).expand(26, 20) % torch.tensor([f.rows for f in FEATURES]).view(-1, 1)
    batch = Made(0, 20)
    batch.sparse = one_hot(first.numpy().copy())
    list(Ids(FEATURES).training([batch]))
    largest = renamed(batch)[-1].double() / FEATURES[-1].rows
    assert 0.3 < largest.mean() < 0.7
    assert largest.max() > 0.8


def test_familiarity_is_the_mean_log_count_over_the_chosen_tables():
    ids = Ids(FEATURES)
    trained = [Made(seed) for seed in range(3)]
    list(ids.training(trained))
    tables = [25, 3]
    ((_, familiarity),) = ids.testing([Made(9)], tables)
    counts = [torch.cat([batch.ids[table] for batch in trained]) for table in tables]
    for sample in range(64):
        seen = [
            float((count == Made(9).ids[table, sample]).sum())
            for table, count in zip(tables, counts, strict=True)
        ]
        assert familiarity[sample] == pytest.approx(np.log1p(seen).mean())


def test_slices_are_thirds_from_rare_to_common():
    familiarity = torch.tensor([5.0, 0.0, 3.0, 0.0, 4.0, 1.0])
    assert slice_of(familiarity).tolist() == [2, 0, 1, 0, 2, 1]


def test_the_prioritised_tables_cover_what_is_asked_for():
    rows = [10, 1000, 30, 500]
    features = [Feature(name=str(number), rows=size) for number, size in enumerate(rows)]
    assert prioritised_tables(features, 0.9) == [1, 3]
    assert prioritised_tables(features, 1.0) == [0, 1, 2, 3]
    seven = [
        Feature(name=str(number), rows=size) for number, size in enumerate(emulation_data.DEFAULT.table_rows)
    ]
    assert len(prioritised_tables(seven, emulation_data.DEFAULT_COVERING)) == 7


def test_data_sets_and_their_skewed_variants_are_made_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = default_dataset(quick=True)
    flat = skewed_dataset(made, 0.5)
    assert flat.parent == made.parent
    times = [path.stat().st_mtime_ns for path in sorted(flat.rglob("*"))]
    assert skewed_dataset(made, 0.5) == flat
    assert [path.stat().st_mtime_ns for path in sorted(flat.rglob("*"))] == times
