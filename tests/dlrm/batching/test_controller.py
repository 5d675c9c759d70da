"""Sizes of batches follow the speeds of ranks, and nothing else."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.batching.controller import LEAST_SHARE, BatchController, shares

speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


class Ranks:
    """Ranks whose steps take a fixed time and a time for each sample, both by their speed."""

    def __init__(self, speeds, *, fixed=0.02, a_sample=1e-4, noise=0.0, seed=0, batch=2048):
        self.speeds, self.fixed, self.a_sample, self.noise = np.asarray(speeds), fixed, a_sample, noise
        self.rng = np.random.default_rng(seed)
        self.controller = BatchController([batch] * len(speeds))
        self.changes, self.elapsed_s = [], 0.0

    def seconds(self, sizes):
        return (self.fixed + self.a_sample * np.asarray(sizes)) / self.speeds

    def train(self, steps):
        for _ in range(steps):
            seconds = self.seconds(self.controller.sizes)
            seconds = seconds * self.rng.uniform(1 - self.noise, 1 + self.noise, len(seconds))
            self.elapsed_s += seconds.max()
            before = self.controller.sizes
            total = sum(before)
            if (changed := self.controller.observe(seconds)) is not None:
                assert changed == self.controller.sizes
                assert sum(changed) == total
                assert changed == shares(np.array(before) / self.controller.seconds, total), "as is logged"
                self.changes.append(self.elapsed_s)

    @property
    def step_s(self):
        return self.seconds(self.controller.sizes).max()


@given(speeds=speeds, total=st.integers(1, 5000))
@settings(max_examples=500)
def test_shares_keep_the_sum_the_order_of_speeds_and_the_bound(speeds, total):
    if total < len(speeds):
        with pytest.raises(ValueError, match="cannot give each"):
            shares(speeds, total)
        return
    sizes = shares(speeds, total)
    assert sum(sizes) == total
    assert min(sizes) >= max(1, int(LEAST_SHARE * total / len(speeds)))
    by_speed = [size for _, size in sorted(zip(speeds, sizes, strict=True))]
    assert all(slow <= fast + 1 for slow, fast in pairwise(by_speed))
    exact = np.asarray(speeds) * total / sum(speeds)
    if exact.min() >= max(1, LEAST_SHARE * total / len(speeds)):
        assert np.abs(np.asarray(sizes) - exact).max() < 1


@given(
    slow=st.floats(0.13, 0.8), num_ranks=st.integers(2, 6), noise=st.floats(0, 0.15), seed=st.integers(0, 99)
)
@settings(max_examples=60)
def test_a_slow_rank_gets_less_until_all_take_equally_long(slow, num_ranks, noise, seed):
    ranks = Ranks([slow] + [1.0] * (num_ranks - 1), noise=noise, seed=seed)
    ranks.train(400)
    took = ranks.seconds(ranks.controller.sizes)
    at_bound = min(ranks.controller.sizes) == int(LEAST_SHARE * 2048)
    assert at_bound or took.max() / took.min() < 1.15
    assert 1 <= len(ranks.changes) <= 6
    assert len(set(ranks.controller.sizes[1:])) <= 2 or noise


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_changes_almost_nothing(seed):
    """Equal ranks with +-15 %: at most a change in ten minutes; a wrong one is small."""
    ranks = Ranks([1.0, 1.0, 1.0], noise=0.15, seed=seed)
    while ranks.elapsed_s < 600:
        ranks.train(100)
    assert len(ranks.changes) <= 1
    assert max(ranks.controller.sizes) < 1.1 * 2048


def test_a_speed_that_changes_is_followed_within_half_a_minute():
    ranks = Ranks([1.0, 1.0], noise=0.15)
    ranks.train(300)
    assert not ranks.changes
    for speed in (0.25, 1.0):
        changed_s, ranks.speeds = ranks.elapsed_s, np.asarray([speed, 1.0])
        while ranks.elapsed_s < changed_s + 30:
            ranks.train(1)
        took = ranks.seconds(ranks.controller.sizes)
        assert took.max() / took.min() < 1.15
    assert len(ranks.changes) <= 8


def test_small_batches_are_not_changed_by_rounding():
    ranks = Ranks([1.0, 1.04], batch=10)
    ranks.train(200)
    assert not ranks.changes


def test_all_ranks_decide_alike_as_they_see_the_same():
    first, second = (Ranks([0.3, 1.0, 0.7], noise=0.1, seed=4) for _ in range(2))
    first.train(100)
    second.train(100)
    assert first.controller.sizes == second.controller.sizes
    assert first.changes == second.changes != []


def test_a_small_difference_is_seen_through_the_noise_of_short_steps():
    """Steps of a few milliseconds vary by half; after a recovery, sizes come back to equal ones."""
    ranks = Ranks([0.25, 1.0], fixed=0.002, a_sample=2e-5, noise=0.5, batch=256)
    ranks.train(3000)
    assert ranks.controller.sizes[0] < 150
    ranks.speeds = np.ones(2)
    while ranks.elapsed_s < 300:
        ranks.train(100)
    assert min(ranks.controller.sizes) / max(ranks.controller.sizes) > 0.85, "the dead band, twice, and noise"
