"""Calibration in bins: nothing is lost, similar predictions are together, extremes have a place."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.metrics import Reliability, calibration_error
from dlrm.metrics.reliability import NUM_BINS

CPU = torch.device("cpu")
LOGITS = st.floats(-1e30, 1e30) | st.floats(-5, 5)


@given(samples=st.lists(st.tuples(LOGITS, st.booleans()), max_size=300), cut=st.integers(0, 300))
def test_every_sample_is_in_one_bin(samples, cut):
    logits = torch.tensor([logit for logit, _ in samples], dtype=torch.float32)
    labels = torch.tensor([click for _, click in samples], dtype=torch.float32)
    reliability = Reliability(CPU)
    for piece in (slice(cut), slice(cut, None)):
        reliability.update(logits[piece], labels[piece])
    bins = reliability.compute()
    assert len(bins) <= NUM_BINS
    assert sum(each.num_samples for each in bins) == len(samples)
    clicks = sum(each.num_samples * each.observed for each in bins)
    predicted = sum(each.num_samples * each.predicted for each in bins)
    assert clicks == pytest.approx(labels.sum().item())
    assert predicted == pytest.approx(logits.double().sigmoid().sum().item())
    assert [each.predicted for each in bins] == sorted(each.predicted for each in bins)


def test_bins_have_as_many_samples_and_show_how_wrong_predictions_are():
    generator = np.random.default_rng(0)
    logits = generator.normal(-1.5, 1.0, 100_000)
    clicks = generator.random(len(logits)) < 1 / (1 + np.exp(-logits))

    def bins_of(shift):
        reliability = Reliability(CPU)
        reliability.update(torch.tensor(logits + shift, dtype=torch.float32), torch.tensor(clicks).float())
        return reliability.compute()

    right, wrong = bins_of(0), bins_of(1.0)
    assert len(right) == NUM_BINS
    assert all(abs(each.num_samples - 5000) < 500 for each in right)
    assert calibration_error(right) < 0.01
    raised = 1 / (1 + np.exp(-logits - 1.0))
    assert calibration_error(wrong) == pytest.approx(raised.mean() - clicks.mean(), abs=0.005)


def test_without_samples_there_is_nothing():
    assert Reliability(CPU).compute() == []
    assert calibration_error([]) is None
