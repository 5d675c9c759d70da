import numpy as np
import pytest

from data.synthetic.popularity import Popularity
from data.synthetic.profile import CATEGORY_MISSING
from data.synthetic.teacher import Bag, Teacher

ROWS = (50, 1_000, 100_000, *(20,) * 23)
TABLES = tuple(Popularity(rows) for rows in ROWS)


def teacher(angle=0.0):
    draws = (np.random.default_rng(0), np.random.default_rng(1))
    return Teacher(TABLES, CATEGORY_MISSING, draws, angle)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(5)
    dense = rng.exponential(2, (64, 13)).astype(np.float32)
    return dense, [rng.integers(0, rows, 64) for rows in ROWS]


def score(model, dense, ids, **changed):
    """Scores with the ids of some features replaced, e.g. `f3=7`."""
    changes = {int(name[1:]): value for name, value in changed.items()}
    columns = [np.full(64, changes[f]) if f in changes else column for f, column in enumerate(ids)]
    return model.score(dense, tuple(Bag(column) for column in columns))


def second_difference(model, samples, part):
    """What the ids 2 and 9 of features 0 and 1 do together beyond what each does alone."""
    at = [[score(model, *samples, f0=first, f1=second)[part] for second in (4, 9)] for first in (3, 2)]
    return at[1][1] - at[1][0] - at[0][1] + at[0][0]


def test_main_effects_add_up_and_pairs_interact(samples):
    assert np.abs(second_difference(teacher(), samples, 0)).max() < 1e-4
    together = second_difference(teacher(), samples, 1)
    assert np.abs(together).min() > 1e-3
    assert np.ptp(together) < 1e-3, "what two ids do together does not depend on the other features"


def test_a_feature_does_not_interact_with_itself(samples):
    dense, ids = samples
    pairs = [score(teacher(), 0 * dense + teacher()._mean, [0 * c for c in ids], f0=i)[1] for i in (1, 2, 3)]
    factors = [teacher()._tables[f][0, 2:] for f in range(1, 26)]
    for i, found in zip((1, 2, 3), pairs, strict=True):
        vectors = [teacher()._tables[0][i, 2:], *factors]
        expected = sum(a @ b for k, a in enumerate(vectors) for b in vectors[k + 1 :])
        assert found[0] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_pairs_of_categories_vanish_on_average_over_one_of_them():
    """Interactions are pure: nothing is left of them for a main effect to learn."""
    for table, law, absent in zip(teacher()._tables, TABLES, CATEGORY_MISSING, strict=True):
        accesses = np.concatenate([[absent], (1 - absent) * law.probabilities(len(table) - 1)])
        assert np.abs(accesses @ table[:, 2:]).max() < 1e-4


def test_bag_counts_with_its_mean_and_empty_bag_with_nothing(samples):
    dense, ids = samples
    single = tuple(Bag(column) for column in ids)
    repeated = tuple(Bag(column.repeat(3), np.full(64, 3)) for column in ids)
    for one, same in zip(teacher().score(dense, single), teacher().score(dense, repeated), strict=True):
        np.testing.assert_allclose(same, one, rtol=1e-4, atol=1e-3)
    mixed = list(single)
    mixed[0] = Bag(np.array([1, 2] * 32), np.array([2, 0] * 32))
    main = teacher().score(dense, tuple(mixed))[0]
    ends = [score(teacher(), dense, ids, f0=i)[0] for i in (1, 2)]
    np.testing.assert_allclose(main[::2], (ends[0][::2] + ends[1][::2]) / 2, atol=1e-4)
    without = main[1::2] - ends[0][1::2] + teacher()._tables[0][1, 0]
    np.testing.assert_allclose(without, 0, atol=1e-4)


def test_effects_turn_slowly_and_keep_their_size():
    first, turned = teacher()._tables[1][:, 0], teacher(angle=0.3)._tables[1][:, 0]
    assert np.corrcoef(first, turned)[0, 1] == pytest.approx(np.cos(0.3), abs=0.1)
    assert turned.std() / first.std() == pytest.approx(1, abs=0.5)


def test_large_tables_share_effects_between_rare_ids(samples):
    assert (score(teacher(), *samples, f2=7)[0] == score(teacher(), *samples, f2=7 + 65_536)[0]).all()
