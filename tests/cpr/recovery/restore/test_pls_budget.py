"""The portion of lost samples."""

import random
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.recovery.decide.assessment import Assessment, MirrorMoment
from cpr.recovery.restore.pls_budget import PlsBudget, pls_added, pls_expected
from cpr.recovery.run.progress import Charge, RunProgress


def test_a_lost_node_costs_its_samples_since_the_save():
    # one of 4 workers, 600 of 10,000 samples: the paper's 600 / (10,000 x 4)
    assert pls_added({2: 1.0}, 1600, 1000, 10_000, 4) == pytest.approx(0.015)
    assert pls_added({2: 1.0, 3: 1.0}, 1600, 1000, 10_000, 4) == pytest.approx(0.03)


def test_nothing_lost_costs_nothing_even_if_the_total_is_unknown():
    assert pls_added({}, 1600, 1000, None, 4) == 0.0
    assert pls_added({0: 1.0}, 1600, 1000, None, 4) is None


def test_samples_are_lost_once():
    charged = [Charge(4, 2, 1.0, 1000, 1600), Charge(4, 3, 0.5, 1000, 1600), Charge(8, 1, 1.0, 1000, 1600)]

    def samples(lost, done=1600, saved=1000):
        return pls_added(lost, done, saved, 10_000, 4, charged) * 10_000 * 4

    assert samples({2: 1.0}) == 0
    assert samples({1: 1.0}) == pytest.approx(600)  # another worker
    assert samples({2: 1.0, 3: 1.0}) == pytest.approx(300)
    assert samples({2: 1.0}, done=1700) == pytest.approx(100)  # those trained since
    assert samples({2: 1.0}, saved=900) == pytest.approx(100)  # that save does not load any more
    assert samples({2: 1.0}, done=1900, saved=1800) == pytest.approx(100)  # all of it after the next save


def test_what_is_lost_again_costs_exactly_nothing():
    """However the shares are rounded: a policy asks whether it is 0, and nothing is negative."""
    for seed in range(200):
        draw = random.Random(seed)
        lost, done = {rank: draw.random() for rank in range(4)}, draw.randint(1, 10**6)
        charged = [Charge(4, rank, share, 0, done) for rank, share in lost.items()]
        assert pls_added(lost, done, 0, 10**7, 4, charged) == 0


def test_failures_at_random_moments_cost_what_is_expected_on_average():
    """Saves every 80 samples of 100,000; each failure takes one of 4 workers, or two."""
    draw, progress, surplus = random.Random(5), RunProgress(), []
    for step in range(1, 10_001):
        progress.step(10)
        if step > 16 and draw.random() < 0.2:
            lost = {0: 1.0, 1: 1.0} if draw.random() < 0.3 else {2: 1.0}
            done, newest_save = progress.samples_done - draw.uniform(0, 10), (step - 1) // 8 * 8
            measured = pls_added(lost, done, progress.samples_at(newest_save), 100_000, 4)
            surplus.append(measured - pls_expected(lost, progress.samples_between_saves, 100_000, 4))
        if step % 8 == 0:
            progress.note_save()
    assert len(surplus) > 1000
    assert abs(fmean(surplus)) < 4 * stdev(surplus) / len(surplus) ** 0.5


def test_what_is_expected_is_unknown_without_saves_or_a_total():
    assert pls_expected({0: 1.0}, None, 100, 4) is None
    assert pls_expected({0: 1.0}, 10.0, None, 4) is None
    assert pls_expected({0: 0.5}, 10.0, 100, 4) == pytest.approx(0.5 * 5 / 400)


@given(
    saved=st.integers(0, 9), behind=st.integers(0, 5), share=st.floats(0, 0.99), is_other_lost=st.booleans()
)
def test_rows_that_a_mirror_lacks_cost_their_own_age(saved, behind, share, is_other_lost):
    """Of worker 1, whose mirror has some rows, and perhaps of worker 0 without a mirror; charged once."""
    progress = RunProgress()
    for step in range(16):
        if step == saved:
            progress.note_save()
        progress.step(10)
    mirrored = MirrorMoment(step=16 - behind, samples=160 - 10 * behind, share=share)
    found = Assessment(
        slot=None,
        slot_of=None,
        interrupted=False,
        held=(),
        needed=(),
        lost={1: 1.0} | ({0: 0.5} if is_other_lost else {}),
        old_world_size=2,
        mirrored={1: mirrored},
    )
    budget = PlsBudget(None, SimpleNamespace(world_size=2, rank=0), progress, 1000)
    cost = budget.cost_of_loss(found, [], saved)
    samples = 10 * behind + (1 - share) * (160 - 10 * behind - 10 * saved)
    assert cost.pls == pytest.approx((samples + 0.5 * (160 - 10 * saved) * is_other_lost) / 2000)
    assert cost.samples == 160 - 10 * saved
    budget.charge(cost)
    assert budget.cost_of_loss(found, [], saved).pls == 0


SHARES = st.dictionaries(st.integers(0, 7), st.floats(0, 1))
SAMPLES = st.integers(0, 10**9)
CHARGES = st.builds(Charge, st.just(8), st.just(3), st.floats(0, 1), SAMPLES, SAMPLES)


@given(SHARES, SAMPLES, SAMPLES, st.lists(CHARGES, max_size=1))
def test_pls_is_a_portion(lost, done, saved, charges):
    assert 0 <= pls_added(lost, max(done, saved), min(done, saved), 10**9, 8, charges) <= 1
