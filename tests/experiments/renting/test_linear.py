"""Linear regression whose gradient noise is known."""

import pytest
import torch

from experiments.renting import linear
from experiments.renting.linear import CASES, closed_form, measure


def test_closed_form_is_the_covariance_of_drawn_gradients():
    random = torch.Generator().manual_seed(0)
    variances, error, noise = torch.tensor([1.0, 0.5, 0.1]), torch.tensor([0.4, -0.3, 1.0]), 0.7
    x = torch.randn(1_000_000, 3, generator=random) * variances.sqrt()
    gradients = (x @ error + noise * torch.randn(len(x), generator=random))[:, None] * x
    trace, squared_norm = closed_form(variances, error, noise)
    assert trace == pytest.approx(float(gradients.var(0).sum()), rel=0.01)
    assert squared_norm == pytest.approx(float(gradients.mean(0).square().sum()), rel=0.02)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_of_a_training_run_give_its_noise_scale(case):
    row = measure(case, seed=7, steps=400)
    assert row["found"] == pytest.approx(row["exact"], rel=0.2)
    assert row["batch"] == sum(case.sizes)


def test_the_window_moves(monkeypatch):
    """What the gradient was before the window does not count."""
    monkeypatch.setattr(linear, "RATE", 0.02)
    row = measure(CASES[0], seed=0, steps=linear.WINDOW + 200)
    first = closed_form(torch.logspace(0, -1, linear.COLUMNS), torch.ones(linear.COLUMNS) / 8, 0.5)
    assert row["exact"] > 2 * first[0] / first[1]
