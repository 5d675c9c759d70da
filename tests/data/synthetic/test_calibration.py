import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from data.synthetic.calibration import INTERACTION_SHARE, Calibration, expected_auc


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_click_rate_auc_and_interactions_are_the_wanted_ones(scale):
    rng = np.random.default_rng(0)
    main, pairs = scale * (3 + rng.standard_normal(20_000)), scale * rng.standard_gamma(2, 20_000)
    fitted = Calibration.fit(main, pairs)
    probabilities = fitted.probabilities((main, pairs))
    assert probabilities.mean() == pytest.approx(0.25, abs=1e-3)
    assert expected_auc(np.sort(probabilities)) == pytest.approx(0.80, abs=1e-3)
    parts = np.var(fitted.pairs_slope * pairs), np.var(fitted.main_slope * main)
    assert parts[0] / sum(parts) == pytest.approx(INTERACTION_SHARE)


def test_expected_auc_is_the_mean_over_drawn_labels():
    rng = np.random.default_rng(1)
    probabilities = np.sort(rng.beta(1, 3, 400))
    drawn = [roc_auc_score(rng.random(400) < probabilities, probabilities) for _ in range(400)]
    error = np.std(drawn) / 20
    assert expected_auc(probabilities) == pytest.approx(np.mean(drawn), abs=4 * error)
