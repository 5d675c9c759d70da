"""Time and money by workers and batch, and which of them are worth considering."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.estimator.planning.formulas import Job
from cpr.estimator.planning.recommend import recommend
from cpr.estimator.renting.offers import Offer, WorkerFailures, knee, pareto, plan_rent
from cpr.estimator.renting.samples import SamplesNeeded
from cpr.estimator.renting.step_time import StepTime, TimedStep
from tests.cpr.estimator.renting.lines import LINK, TRAFFIC, seconds

MODEL = StepTime(
    fixed_s=0.01,
    sample_s=2e-5,
    worker_s=0.001,
    byte_s=2e-9,
    traffic=TRAFFIC,
    link_bytes_per_s=LINK,
    steps=[TimedStep(workers=n, batch=b, seconds=seconds(n, b)) for n, b in ((1, 8192), (4, 512))],
)
SAMPLES = SamplesNeeded(least_samples=1e9, least_steps=1e6, source="")
FAILURES = WorkerFailures(T_fail=50 * 3600.0, O_save=60.0, blocked_save=6.0, O_load=30.0, O_res=90.0)


def offer(money, hours):
    """An offer of one worker with that time and money."""
    return Offer(
        workers=1, batch=1, step_s=3600.0, samples=hours, overhead=0.0, price=money / hours if hours else 1.0
    )


def test_time_and_money_of_an_offer():
    (found,) = plan_rent([4], [1024], MODEL, SAMPLES, price=0.5).offers
    hours = (1e9 + 1e6 * 1024) / 1024 * seconds(4, 1024) / 3600
    assert found.hours == pytest.approx(hours)
    assert found.money == pytest.approx(4 * 0.5 * hours)
    assert not found.is_extrapolated


def test_failures_and_saves_prolong_it_by_the_formulas():
    plain, more = (
        plan_rent([1, 4], [1024], MODEL, SAMPLES, 0.5, failures).offers for failures in (None, FAILURES)
    )
    for before, after in zip(plain, more, strict=True):
        job = Job(
            T_total=3600 * before.hours,
            T_fail=FAILURES.T_fail / after.workers,
            O_save=60.0,
            blocked_save=6.0,
            O_load=30.0,
            O_res=90.0,
            N_emb=after.workers,
        )
        assert after.overhead == recommend(job).chosen.overhead.total > 0
        assert after.hours == pytest.approx(before.hours * (1 + after.overhead))
    assert more[1].overhead > more[0].overhead, "four workers fail four times as often"
    with pytest.raises(ValueError, match="less than a save"):
        plan_rent([4], [1024], MODEL, replace(SAMPLES, least_samples=9.0, least_steps=0.0), 0.5, FAILURES)


def test_other_links_change_what_is_exchanged():
    slow, fast = (
        plan_rent([1, 2], [1024], MODEL, SAMPLES, 1.0, link_bytes_per_s=link).offers
        for link in (LINK, 2 * LINK)
    )
    assert slow[0].step_s == fast[0].step_s
    assert slow[1].step_s - fast[1].step_s == pytest.approx(TRAFFIC.sent(2, 1024) / LINK / 2)


def test_batches_that_cannot_be_divided_are_left_out():
    plan = plan_rent([1, 3], [1024, 1536], MODEL, SAMPLES, 1.0)
    assert [(each.workers, each.batch) for each in plan.offers] == [(1, 1024), (1, 1536), (3, 1536)]
    with pytest.raises(ValueError, match="none of these batches"):
        plan_rent([3], [1024], MODEL, SAMPLES, 1.0)


@pytest.mark.parametrize(
    ("workers", "batches", "price", "message"),
    [
        ([1], [8], 0.0, "the price is 0"),
        ([1], [8], float("inf"), "the price is inf"),
        ([64], [64], 1.7e308, "what it costs is no number"),
        ([0], [8], 1.0, "there are no workers"),
        ([1], [], 1.0, "no samples"),
    ],
)
def test_impossible_values(workers, batches, price, message):
    with pytest.raises(ValueError, match=message):
        plan_rent(workers, batches, MODEL, SAMPLES, price)


sizes = st.floats(0.01, 1000)


@given(st.lists(st.tuples(sizes, sizes), min_size=1))
def test_the_pareto_set_holds_what_nothing_beats(pairs):
    offers = [offer(*pair) for pair in pairs]
    best = pareto(offers)
    for each in offers:
        beaten = [
            other
            for other in best
            if other.money <= each.money and other.hours <= each.hours and other is not each
        ]
        same = [other for other in beaten if (other.money, other.hours) == (each.money, each.hours)]
        assert (each in best) or beaten
        assert not any(each is other for other in best) or beaten == same
    assert [each.money for each in best] == sorted(each.money for each in best)
    assert knee(best) in best


def test_the_knee_saves_most_time_for_its_money():
    best = pareto([offer(1, 10), offer(2, 3), offer(5, 2.5), offer(9, 2)])
    assert knee(best).money == pytest.approx(2)
    assert knee(best[:1]) is best[0]
