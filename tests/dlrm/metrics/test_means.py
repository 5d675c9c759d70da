"""Means of per-sample values, against NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.metrics import SampleMeans

VALUES = st.lists(st.lists(st.one_of(st.floats(-10, 10, width=32), st.just(float("nan"))), max_size=5))


@given(VALUES)
def test_samples_without_a_value_are_left_out(batches):
    means = SampleMeans()
    for batch in batches:
        means.update({"recall": torch.tensor(batch), "one": torch.ones(len(batch))}, len(batch))
    found, num_samples = means.compute()
    values = np.concatenate([*batches, []])
    assert num_samples == len(values)
    if batches:
        kept = values[~np.isnan(values)]
        assert found["recall"].num_samples == len(kept)
        assert found["recall"].value == (pytest.approx(kept.mean()) if len(kept) else None)
        assert found["one"].value == (1.0 if len(values) else None)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_mean_is_undefined_and_warned_of(value, caplog):
    means = SampleMeans()
    means.update({"ratio": torch.tensor([1.0, value]), "one": torch.ones(2)}, 2)
    means.update({"ratio": torch.tensor([2.0, -value]), "one": torch.ones(2)}, 2)
    found, _ = means.compute()
    assert (found["ratio"].value, found["one"].value) == (None, 1.0)
    (record,) = caplog.records
    assert "are infinite for some samples, and reported as undefined: ratio. Give" in record.message


def test_a_value_that_is_not_one_per_sample_is_refused():
    with pytest.raises(ValueError, match=r"metric recall has values of shape \[3, 2\] for 3 samples"):
        SampleMeans().update({"recall": torch.zeros(3, 2)}, 3)
