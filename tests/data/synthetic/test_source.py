import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import roc_auc_score

from data.synthetic import ClickSource, SyntheticConfig
from data.synthetic.config import BAG_SIZES
from data.synthetic.profile import CATEGORY_MISSING, DENSE_MISSING

ROWS = 16_384


@pytest.fixture(scope="module")
def source():
    return ClickSource(SyntheticConfig())


@pytest.fixture(scope="module")
def block(source):
    return source.block(0, 0)


def assert_same(one, other):
    for name in ("labels", "probabilities", "integers", "integers_missing", "dense"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for bag, same in zip(one.bags, other.bags, strict=True):
        np.testing.assert_array_equal(bag.ids, same.ids)
        np.testing.assert_array_equal(bag.lengths, same.lengths)


@pytest.mark.parametrize("options", [{}, {"drift": 0.2}, {"multi_hot": True}], ids=str)
def test_block_does_not_depend_on_what_was_drawn_before(options):
    config = SyntheticConfig(rows_per_day=600, rows_per_block=200, rows_per_file=200, **options)
    wanderer = ClickSource(config)
    for day, index in [(3, 1), (0, 0), (1, 2), (3, 1)]:
        assert_same(wanderer.block(day, index), ClickSource(config).block(day, index))


def test_blocks_days_and_seeds_differ(source, block):
    others = [source.block(0, 1), source.block(1, 0), ClickSource(SyntheticConfig(seed=2)).block(0, 0)]
    for other in others:
        assert np.mean(other.bags[2].ids == block.bags[2].ids) < 0.5
        assert np.mean(other.dense[:, 4] == block.dense[:, 4]) < 0.1


def test_values_are_missing_as_often_as_in_criteo(block):
    np.testing.assert_allclose(block.integers_missing.mean(0), DENSE_MISSING, atol=0.02)
    for bag, share in zip(block.bags, CATEGORY_MISSING, strict=True):
        assert np.mean(bag.ids == 0) == pytest.approx(share, abs=0.02)


def test_dense_is_the_log_of_what_is_there(block):
    seen = np.where(block.integers_missing, 0, np.maximum(block.integers, 0))
    np.testing.assert_array_equal(block.dense, np.log(seen + 1.0).astype(np.float32))
    assert block.dense.shape == (ROWS, 13)


def test_integers_have_heavy_tails_and_only_the_second_is_negative(block):
    there = [column[~gone] for column, gone in zip(block.integers.T, block.integers_missing.T, strict=True)]
    assert [column.min() < 0 for column in there] == [False, True] + [False] * 11
    assert all(column.mean() > np.median(column) for column in there)
    assert there[4].max() > 50 * np.median(there[4])


def test_large_tables_are_as_skewed_as_criteo(source, block):
    for bag, rows in zip(block.bags, source.config.table_rows, strict=True):
        assert bag.ids.max() < rows
        if rows >= 1000:
            present = bag.ids[bag.ids > 0]
            assert np.mean(present <= round(0.01 * (rows - 1))) == pytest.approx(0.75, abs=0.03)


def test_labels_are_drawn_from_the_probabilities(block):
    deciles = np.digitize(block.probabilities, np.quantile(block.probabilities, np.linspace(0, 1, 11)[1:-1]))
    for decile in range(10):
        inside = deciles == decile
        expected = block.probabilities[inside]
        error = np.sqrt((expected * (1 - expected)).sum())
        assert abs(block.labels[inside].sum() - expected.sum()) < 5 * error
    assert block.labels.mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    "options", [{}, {"seed": 7}, {"preset": "terabyte", "scale": 1.0}, {"multi_hot": True}], ids=str
)
def test_best_auc_is_about_that_of_criteo_whatever_the_configuration(options):
    block = ClickSource(SyntheticConfig(**options)).block(1, 0)
    assert roc_auc_score(block.labels, block.probabilities) == pytest.approx(0.80, abs=0.015)


def test_multi_hot_bags_have_mlperf_sizes_or_are_empty():
    config = SyntheticConfig(multi_hot=True, rows_per_day=2_000)
    block = ClickSource(config).block(0, 0)
    for bag, size, share in zip(block.bags, BAG_SIZES, CATEGORY_MISSING, strict=True):
        assert set(bag.lengths) <= {0, size}
        assert np.mean(bag.lengths == 0) == pytest.approx(share, abs=0.05)
        assert bag.lengths.sum() == len(bag.ids)
        assert bag.ids.min() > 0


def test_the_world_moves_with_drift():
    """The same samples have other click probabilities later, and other ids are popular."""
    moving = ClickSource(SyntheticConfig(drift=0.2))
    shares = [np.bincount(moving.block(day, 0).bags[2].ids, minlength=21_000) / ROWS for day in (0, 1, 4)]
    distances = [np.abs(shares[0] - share).sum() / 2 for share in shares[1:]]
    standing = ClickSource(SyntheticConfig()).block(1, 0).bags[2].ids
    noise = np.abs(shares[0] - np.bincount(standing, minlength=21_000) / ROWS).sum() / 2
    assert noise + 0.05 < distances[0] < distances[1] - 0.1


def test_block_that_does_not_exist(source):
    with pytest.raises(IndexError):
        source.block(0, 13)


def test_a_model_learns_the_main_effects_but_not_beyond_the_best_auc(source):
    """One pass of a logistic regression over 12 blocks; the interactions stay out of its reach."""
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.01, random_state=0)
    for index in range(12):
        block = source.block(0, index)
        model.partial_fit(one_hot(source, block), block.labels, classes=[0, 1])
    test = source.block(1, 0)
    reached = roc_auc_score(test.labels, model.decision_function(one_hot(source, test)))
    assert 0.70 < reached < roc_auc_score(test.labels, test.probabilities) - 0.02


def one_hot(source, block):
    """Dense values and one column an id, as a sparse matrix."""
    rows = source.config.table_rows
    ids = np.stack([bag.ids for bag in block.bags], axis=1) + np.concatenate([[0], np.cumsum(rows)[:-1]])
    starts = np.arange(0, ids.size + 1, len(rows))
    chosen = sparse.csr_matrix((np.ones(ids.size), ids.ravel(), starts), shape=(len(ids), sum(rows)))
    return sparse.hstack([chosen, sparse.csr_matrix(block.dense / 5)], format="csr")
