"""Formulas of mirrors agree with counting, with a clock of steps, and with what is plain."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import expected_pls, overhead_partial
from cpr.estimator.planning.mirror import (
    CPU_S_PER_BYTE,
    FILL_BYTES_PER_STEP,
    MirrorModel,
    expected_pls_with_mirror,
    overhead_with_mirror,
    uncovered,
)
from cpr.estimator.planning.mirror_plan import SIZES, plan_mirror
from cpr.estimator.planning.mirror_text import as_text
from cpr.mirror.copy import PASS_BYTES
from tests.cpr.estimator.planning.jobs import HOUR, KAGGLE, jobs

MIRROR = MirrorModel(rows=10_000_000, row_bytes=260, changed_rows=40_000, step_s=0.25, workers=2)
FREE = replace(MIRROR, slows_s=0.0)
BLOCKED = replace(KAGGLE, blocked_save=3.0)
RACKS = FailureModel(group_share=0.9, group_nodes=4)
groups = st.builds(FailureModel, group_share=st.floats(0, 1), group_nodes=st.integers(1, 20))


@st.composite
def mirrors(draw):
    rows = draw(st.integers(1, 10**8))
    return MirrorModel(
        rows=rows,
        row_bytes=draw(st.integers(4, 4096)),
        changed_rows=rows * draw(st.floats(1e-6, 1)),
        step_s=draw(st.floats(0.01, 1)),
        workers=draw(st.integers(1, 8)),
        link_gbps=draw(st.floats(0.1, 100)),
        slows_s=draw(st.none() | st.floats(0, 0.01)),
        every_steps=draw(st.integers(1, 100)),
        share=draw(st.floats(0.01, 1)),
        distance=draw(st.integers(1, 20)),
    )


several_nodes = jobs().filter(lambda job: job.N_emb >= 2)


def test_bytes_and_memory_of_a_moment():
    assert MIRROR.period_steps == 1
    assert MIRROR.moment_bytes == pytest.approx(40_000 * (260 + 8))
    assert MIRROR.link_share == pytest.approx(40_000 * 268 * 8 / 25e9 / MIRROR.slowed_step_s)
    assert MIRROR.slow_share == pytest.approx(40_000 * 268 * CPU_S_PER_BYTE / 2 / 0.25)
    assert MIRROR.memory_bytes == pytest.approx(10_000_000 * 260 + 2.5 * 2 * FILL_BYTES_PER_STEP)
    eighth = replace(MIRROR, share=1 / 8)
    assert MIRROR.memory_bytes - eighth.memory_bytes == pytest.approx(7 / 8 * 10_000_000 * 260)


def test_rows_that_change_again_are_sent_once():
    """Half of the rows change in a step: after two steps three quarters have, after many all."""
    half = replace(FREE, rows=1000, changed_rows=500.0)
    assert replace(half, every_steps=2).moment_bytes == pytest.approx(750 * 268)
    assert replace(half, every_steps=100).moment_bytes == pytest.approx(1000 * 268)
    assert replace(half, changed_rows=1000.0, every_steps=3).moment_bytes == 1000 * 268


def test_filling_takes_a_part_of_each_worker_in_a_step():
    assert FILL_BYTES_PER_STEP == PASS_BYTES
    three_parts = replace(FREE, rows=3 * PASS_BYTES, row_bytes=2)  # of two workers
    assert three_parts.fill_s == pytest.approx(3 * 0.25)
    part_s = 2 * PASS_BYTES / 2 * (2 + 8) * (8 / 0.5e9 + CPU_S_PER_BYTE / 2)
    thin = replace(three_parts, link_gbps=0.5)
    assert thin.fill_s == pytest.approx(3 * 0.25 * np.ceil(part_s / 0.25))


@pytest.mark.parametrize(("every", "travel"), [(1, 0.3), (4, 0.3), (1, 2.5), (3, 7.2), (5, 4.6)])
def test_age_is_that_of_a_clock_of_steps(every, travel):
    """All rows change in each step, so that each moment travels as long: `travel` steps."""
    s_per_byte = 8 / 25e9 + CPU_S_PER_BYTE
    rows = 1_000_000
    step_s = rows * 268 * s_per_byte / travel
    mirror = MirrorModel(
        rows=rows, row_bytes=260, changed_rows=rows, step_s=step_s, slows_s=0.0, every_steps=every
    )
    fine = 100
    taken, arrives, whole, ages = 0, travel, None, []
    for tick in range(20_000):
        now = tick / fine
        if arrives is not None and now >= arrives:
            whole, arrives = taken, None
        if tick % fine == 0 and arrives is None and now - taken >= every:
            taken, arrives = int(now), now + travel
        if whole is not None and now >= 50:
            ages.append(int(now) - whole)
    period = mirror.period_steps
    ages = ages[: len(ages) // (period * fine) * period * fine]
    assert mirror.age_steps == pytest.approx(np.mean(ages), rel=0.02)


@given(st.integers(2, 30), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1))
def test_nodes_without_keeper_are_counted(num_nodes, group, distance, share):
    job = replace(KAGGLE, N_emb=num_nodes)
    mirror = replace(FREE, distance=distance)
    lost = set(range(min(group, num_nodes)))
    keepers = {node: (node + mirror.distance_on(num_nodes)) % num_nodes for node in lost}
    without = sum(keeper in lost for keeper in keepers.values())
    found = uncovered(job, mirror, FailureModel(group_share=share, group_nodes=group))
    assert found.together == pytest.approx(share * without / (1 - share + share * len(lost)))


def test_pls_is_the_age_of_the_mirror_where_nothing_else_is_lost():
    """So that one lost node costs at most one step, with a moment in each."""
    job = replace(KAGGLE, T_fail=1e6 * HOUR, T_total=1e6 * HOUR)
    pls = expected_pls_with_mirror(job, HOUR, FREE, FailureModel())
    of_a_step = FREE.step_s / (job.T_fail * job.N_emb)
    assert pls == pytest.approx(FREE.age_steps * of_a_step, rel=0.01)
    assert pls < of_a_step


def test_pls_is_that_of_the_checkpoint_where_all_nodes_fail_together():
    job = replace(KAGGLE, nodes_lost=8.0)
    all_nodes = FailureModel(group_share=1.0, group_nodes=8)
    assert uncovered(job, FREE, all_nodes).total == 1
    assert expected_pls_with_mirror(job, HOUR, FREE, all_nodes) == pytest.approx(expected_pls(job, HOUR))


def test_node_may_lose_its_keeper_while_one_of_both_recovers():
    """In one recovery of 100 there is a second failure, which takes the other node in half of the cases: then
    two nodes in 100 failures have no keeper."""
    job = replace(KAGGLE, N_emb=2, T_fail=100 * HOUR, O_load=0, O_res=HOUR)
    assert uncovered(job, FREE, FailureModel()).recovering == pytest.approx(1 / 100, rel=0.01)


@given(several_nodes, mirrors(), groups, st.floats(0.01, 1))
def test_properties_of_every_mirror(job, mirror, failures, interval):
    group = min(failures.group_nodes, job.N_emb)
    job = replace(job, nodes_lost=1 + failures.group_share * (group - 1))
    interval_s = interval * job.T_fail
    why = uncovered(job, mirror, failures)
    assert 0 <= max(why.together, why.recovering, why.filling) <= why.total + 1e-12 <= 1 + 2e-12
    pls = expected_pls_with_mirror(job, interval_s, mirror, failures)
    assert pls <= expected_pls(job, interval_s) * (1 + mirror.slow_share) * (1 + 1e-9)
    cost, without = overhead_with_mirror(job, interval_s, mirror), overhead_partial(job, interval_s)
    assert cost.save == pytest.approx(without.save + mirror.slow_share)
    assert cost.total >= without.total
    assert mirror.period_steps >= mirror.every_steps
    longer = replace(mirror, every_steps=mirror.every_steps + 1, slows_s=mirror.slows_s or 0.0)
    same_cost = replace(mirror, slows_s=mirror.slows_s or 0.0)
    assert longer.age_steps >= same_cost.age_steps * (1 - 1e-9)
    older = expected_pls_with_mirror(job, interval_s, longer, failures)
    assert older >= expected_pls_with_mirror(job, interval_s, same_cost, failures) * (1 - 1e-9)


@given(several_nodes, mirrors(), st.integers(2, 100))
def test_more_nodes_that_fail_as_often_each_find_fewer_mirrors_whole(job, mirror, times):
    job = replace(job, nodes_lost=1.0, O_load=0.0, O_res=0.0)
    many = replace(job, N_emb=times * job.N_emb, T_fail=job.T_fail / times)
    few_share, many_share = (uncovered(each, mirror, FailureModel()).filling for each in (job, many))
    assert many_share >= few_share
    few_pls, many_pls = (
        expected_pls_with_mirror(each, job.T_fail / 10, mirror, FailureModel()) for each in (job, many)
    )
    assert many_pls >= few_pls * (1 - 1e-9)


@given(several_nodes, st.floats(0.01, 1), st.floats(0.01, 1))
def test_fewer_mirrored_rows_lose_more(job, one, other):
    few_change = replace(FREE, rows=1000, changed_rows=10.0)
    losses = [
        expected_pls_with_mirror(job, job.T_fail / 10, replace(few_change, share=share), FailureModel())
        for share in sorted((one, other))
    ]
    assert losses[1] <= losses[0] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows is 0; it must be 1 at least"),
        ({"changed_rows": 0.0}, "changed_rows is 0; it must be positive"),
        ({"changed_rows": 2e7}, "only 10,000,000 rows"),
        ({"link_gbps": -1.0}, "must be positive"),
        ({"slows_s": -0.1}, "must be 0 or more"),
        ({"share": 1.5}, "above 0 and at most 1"),
        ({"step_s": float("nan")}, "must be finite"),
    ],
)
def test_impossible_mirrors_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MIRROR, **changes)


def test_one_node_has_no_neighbour():
    with pytest.raises(ValueError, match="needs another node"):
        uncovered(replace(KAGGLE, N_emb=1), MIRROR, FailureModel())


def plan(job, mirror=MIRROR, failures=FailureModel()):  # noqa: B008
    job = replace(job, nodes_lost=failures.mean_nodes)
    return plan_mirror(job, mirror, failures, 0.1)


def text_of(plans):
    return " ".join(as_text(plans).split())


def test_saving_more_often_has_the_overhead_of_the_mirror():
    own = plan(KAGGLE).own
    often = overhead_partial(KAGGLE, own.often_interval_s)
    assert often.total == pytest.approx(own.overhead)
    assert own.often_pls == pytest.approx(expected_pls(KAGGLE, own.often_interval_s))
    assert own.interval_s == pytest.approx(44.8 * HOUR)
    assert own.partial_pls == pytest.approx(0.1)


def test_decision_turns_where_the_mirror_costs_too_much():
    limit = plan(BLOCKED, FREE, RACKS).own.most_slow_share
    assert limit > 0
    for factor, beats in ((0.9, True), (1.1, False)):
        assert plan(BLOCKED, replace(MIRROR, slows_s=factor * limit * 0.25), RACKS).own.beats is beats


def test_mirror_is_useless_where_neighbours_fail_together():
    plans = plan(BLOCKED, failures=RACKS)
    assert not plans.own.beats
    assert plans.own.uncovered.together == pytest.approx(0.9 * 3 / 3.7)
    assert plans.apart.beats
    assert plans.apart.uncovered.together == 0
    text = text_of(plans)
    assert "Saving more often beats the mirror" in text
    assert "73% of the lost nodes lose their keeper with them, as 4 neighbours fail at once. With" in text
    assert f"(--mirror-apart), PLS is {plans.apart.pls:.2g}, and the mirror is better." in text
    placed = text_of(plan(BLOCKED, replace(MIRROR, distance=4), RACKS))
    assert "The mirror beats saving more often" in placed
    assert "--mirror-apart" not in placed


def test_sizes_keep_what_a_node_holds_and_how_often_it_fails():
    job = replace(KAGGLE, N_emb=20)
    plans = plan(job, failures=FailureModel(group_share=0.5, group_nodes=16))
    assert [each.job.N_emb for each in plans.sizes] == sorted({*SIZES, 20})
    for each in plans.sizes:
        assert each.job.N_emb * each.job.T_fail == pytest.approx(20 * KAGGLE.T_fail)
        assert each.job.nodes_lost == pytest.approx(1 + 0.5 * (min(16, each.job.N_emb) - 1))
    assert plans.own is plans.sizes[1]


@pytest.mark.parametrize(
    ("job", "mirror", "sentence"),
    [
        (KAGGLE, MIRROR, "sends 10.7 MB a step, 1.32% of a link of 25 Gb/s"),
        (KAGGLE, MIRROR, "if each worker has one core (--mirror-slows)"),
        (KAGGLE, MIRROR, "The mirror beats saving more often"),
        (KAGGLE, MIRROR, "Whoever accepts a PLS of"),
        (KAGGLE, replace(MIRROR, link_gbps=0.1), "too thin to send it every step: it gets older instead"),
        (KAGGLE, replace(MIRROR, share=0.5), "50% of the rows have no mirror: they come from saves"),
        (replace(KAGGLE, N_emb=2, O_res=3 * HOUR), MIRROR, "lose their keeper while one of both recovers"),
        (KAGGLE, MIRROR, "On 10,000 nodes, 22.3% are lost before all mirrors are whole again"),
        (replace(KAGGLE, O_save=60.0, blocked_save=0.1), MIRROR, "No interval of saves loses as little"),
    ],
)
def test_text_says_what_a_mirror_takes_and_when_it_is_worth_it(job, mirror, sentence):
    assert sentence in text_of(plan(job, mirror))


def test_json_has_the_figures():
    body = plan(KAGGLE).to_json()
    assert body["memory_bytes"] == MIRROR.memory_bytes
    assert [each["nodes"] for each in body["sizes"]] == list(SIZES)
    assert body["own"]["pls"] < body["own"]["often_pls"]
    assert body["own"]["beats"]
