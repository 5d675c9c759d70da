"""The AUC of the last samples, and the warning when it stays at chance."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from dlrm.metrics import ChanceWatch, RunningAuc

CPU = torch.device("cpu")


@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=12),
    window=st.integers(2, 64),
    seed=st.integers(0, 2**16),
)
def test_running_auc_is_exact_over_its_window(sizes, window, seed):
    rng = np.random.default_rng(seed)
    running = RunningAuc(CPU, window)
    # Rounded, so that there are ties.
    scores = [np.round(rng.normal(size=size), 1).astype(np.float32) for size in sizes]
    labels = [(rng.random(size) < 0.5).astype(np.float32) for size in sizes]
    for logits, truth in zip(scores, labels, strict=True):
        running.update(torch.from_numpy(logits), torch.from_numpy(truth))
    last_scores, last_labels = (np.concatenate(parts)[-window:] for parts in (scores, labels))
    if 0 < last_labels.sum() < len(last_labels):
        assert running.value() == pytest.approx(roc_auc_score(last_labels, last_scores), abs=1e-12)
    else:
        assert running.value() is None


def observe(watch: ChanceWatch, aucs: list[float | None], step: int = 100) -> list[str]:
    said = (watch.observe(step * number, auc) for number, auc in enumerate(aucs))
    return [message for message in said if message]


def test_an_auc_that_stays_at_chance_causes_one_warning():
    warnings = observe(ChanceWatch(patience=500), [0.5, 0.507, 0.495, 0.5, 0.5, 0.509, 0.5, 0.5])
    assert len(warnings) == 1
    assert "for 500 samples" in warnings[0]
    for cause in (
        "learning rate",
        "labels",
        "columns have other roles",
        "ids are lost",
        "log-transformed",
    ):
        assert cause in warnings[0]


@pytest.mark.parametrize(
    "aucs",
    [
        [0.5, 0.5, 0.5, 0.5, 0.5],  # not long enough
        [0.5, 0.5, 0.5, 0.52, 0.5, 0.5, 0.5, 0.5],  # it left chance in between
        [0.48] * 10,  # wrong way round is not chance
        [0.78] * 10,
    ],
)
def test_a_model_that_learns_causes_no_warning(aucs):
    assert observe(ChanceWatch(patience=500), aucs) == []


def test_constant_labels_are_named_as_such():
    warnings = observe(ChanceWatch(patience=500), [None] * 10)
    assert len(warnings) == 1
    assert "labels" in warnings[0]
