import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from data.synthetic.calibration import expected_auc
from data.synthetic.scores import Scores


def drawn(seed, rows, shape=(1.0, 3.0)):
    rng = np.random.default_rng(seed)
    probabilities = rng.beta(*shape, rows).clip(1e-9, 1 - 1e-9)
    return probabilities, (rng.random(rows) < probabilities).astype(np.int8)


def scores_of(probabilities, labels):
    scores = Scores()
    scores.add(probabilities, labels)
    return scores


@pytest.mark.parametrize("shape", [(1.0, 3.0), (0.3, 0.3), (20.0, 60.0)])
def test_figures_agree_with_exact_ones(shape):
    probabilities, labels = drawn(0, 50_000, shape)
    summary = scores_of(probabilities, labels).summary()
    assert summary["best_auc"] == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-4)
    assert summary["best_auc_expected"] == pytest.approx(expected_auc(np.sort(probabilities)), abs=1e-4)
    assert summary["best_log_loss"] == pytest.approx(log_loss(labels, probabilities))
    assert summary["click_rate"] == pytest.approx(labels.mean())


@given(st.integers(1, 300), st.integers(1, 300))
def test_scores_of_parts_add_up_to_the_scores_of_the_whole(first, second):
    probabilities, labels = drawn(first * 1000 + second, first + second)
    parts = scores_of(probabilities[:first], labels[:first]) + scores_of(
        probabilities[first:], labels[first:]
    )
    whole = scores_of(probabilities, labels)
    np.testing.assert_allclose(parts.bins, whole.bins)
    assert parts.log_loss == pytest.approx(whole.log_loss)


def test_one_kind_of_label_has_no_auc():
    assert scores_of(np.array([0.2, 0.4]), np.zeros(2, np.int8)).summary()["best_auc"] is None
