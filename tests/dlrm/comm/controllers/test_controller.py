"""Energies, smoothed values, and step times that ranks agree on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.controllers import controller
from dlrm.comm.controllers.controller import SMOOTHED_STEPS, Ewma, agreed_median, energy
from tests.dlrm.comm.controllers.groups import Alone, together


def test_energy_of_a_long_vector_is_that_in_double_precision(monkeypatch):
    monkeypatch.setattr(controller, "SLICE", 1000)
    vector = torch.randn(12_345, generator=torch.Generator().manual_seed(0))
    assert energy(vector).item() == pytest.approx(vector.double().square().sum().item(), rel=1e-6)
    assert energy(vector[:0]).item() == 0


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=60), num_ranks=st.integers(1, 120))
def test_smoothed_value_is_the_weighted_mean_of_the_window(values, num_ranks):
    smoothed = Ewma(num_ranks)
    for value in values:
        smoothed.add(value)
    last = values[-SMOOTHED_STEPS:]
    alpha = min(1.0, num_ranks / 100)
    weights = [alpha * (1 - alpha) ** (len(last) - 1 - place) for place in range(len(last))]
    expected = sum(w * v for w, v in zip(weights, last, strict=True)) / sum(weights)
    assert smoothed.mean == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_restored_smoothed_value_continues():
    smoothed, resumed = Ewma(8), Ewma(8)
    assert math.isnan(smoothed.mean)
    for value in range(40):
        smoothed.add(float(value))
    resumed.load_state_dict(smoothed.state_dict())
    for each in (smoothed, resumed):
        each.add(3.5)
    assert resumed.mean == smoothed.mean


def test_step_times_are_the_mean_of_the_medians_of_ranks():
    seconds = [[1.0, 100.0, 1.0], [3.0, 3.0], [2.0]]
    agreed = together(3, lambda member: agreed_median(member, seconds[member.rank]))
    assert agreed == [2.0, 2.0, 2.0]


def test_step_times_are_nan_if_one_rank_has_none():
    agreed = together(2, lambda member: agreed_median(member, [1.0] * member.rank))
    assert all(math.isnan(each) for each in agreed)
    assert agreed_median(Alone(4), [2.0, 4.0]) == 3.0
