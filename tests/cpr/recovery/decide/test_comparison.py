"""What the ways to recover cost, and which one is taken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.recovery.decide.assessment import RecoveryPolicy
from cpr.recovery.decide.comparison import AUC_PER_PLS, PLAINLY, PLAINLY_S, compare
from cpr.recovery.run.report import Way

# 1,000 samples since the save of a run of 100,000; one of two nodes is lost, and its mirror is a step behind
MIRROR = Way(name="mirror", rows_s=2.0, lost=50.0, pls_added=0.0005, pls=0.0105)
ROWS = Way(name="checkpoint rows", rows_s=1.0, lost=500.0, lost_share=0.5, pls_added=0.005, pls=0.015)
FULL = Way(name="full", rows_s=1.0, redone=1000, pls_added=0.0, pls=0.01)
ALL = (MIRROR, ROWS, FULL)
USUAL = RecoveryPolicy(auc_per_pls=0.001)


def name_of(ways, policy=USUAL, seconds_per_sample=0.1):
    return compare(ways, policy, seconds_per_sample).way.name


@pytest.mark.parametrize(
    ("ways", "limits", "name", "words"),
    [
        (ALL, {}, "mirror", None),
        (ALL, {"max_pls": 0.012}, "mirror", None),
        (ALL[1:], {}, "checkpoint rows", None),
        (ALL[1:], {"max_pls": 0.015}, "checkpoint rows", None),
        (ALL[1:], {"max_pls": 0.014}, "full", "from 0.010000 to 0.015000, above max_pls = 0.014"),
        (ALL[1:], {"max_lost_share": 0.4}, "full", "50.0% of the tables were lost, more than max_lost_share"),
        (ALL[1:], {"max_pls": 0.001}, "full", "above max_pls"),  # which adds nothing
        ([replace(MIRROR, pls=None, pls_added=None), *ALL[1:]], {}, "mirror", None),
        ([replace(MIRROR, pls=None, pls_added=None), FULL], {"max_pls": 0.1}, "full", "not known"),
        ([ROWS, replace(FULL, pls=None, pls_added=None)], {"max_pls": 0.001}, "full", "above max_pls"),
        ([replace(ROWS, pls_added=0.0, lost=0.0)], {"max_pls": 0.001}, "checkpoint rows", None),
    ],
)
def test_the_first_way_within_the_limits_is_taken(ways, limits, name, words):
    choice = compare(ways, RecoveryPolicy(**limits), 0.001)
    assert choice.way.name == name
    assert (choice.reason is None) if words is None else (words in choice.reason)


def test_if_all_are_above_max_pls_the_one_with_the_least_is_taken_and_the_first_of_equals():
    policy, full = RecoveryPolicy(max_pls=0.001), replace(FULL, pls_added=0.004, pls=0.014)
    assert name_of([ROWS, full], policy) == "full"
    assert name_of([ROWS, replace(full, pls=0.015)], policy) == "checkpoint rows"
    assert name_of([replace(ROWS, pls=None), full], policy) == "full"


def test_a_way_is_plainly_cheaper_if_it_is_so_in_seconds_lost_samples_included():
    slow = replace(MIRROR, rows_s=800.0)
    assert name_of([slow, ROWS, FULL]) == "checkpoint rows"
    choice = compare([slow, ROWS, FULL], USUAL, 0.1)
    assert choice.reason == "mirror would take 13.3 min, checkpoint rows 1 s"
    assert name_of([slow, ROWS, FULL], seconds_per_sample=2.0) == "mirror"  # then lost samples are dearer
    assert name_of([slow, ROWS, FULL], seconds_per_sample=None) == "mirror"
    assert (
        name_of([slow, ROWS, FULL], replace(USUAL, max_pls=0.012)) == "full"
    )  # the mirror is not plainly cheaper


def test_the_slopes_are_the_measured_ones():
    stored = Path(__file__).parents[4] / "experiments/results/pls_auc.json"
    figures = json.loads(stored.read_text())["figures"]
    for scheme, slope in AUC_PER_PLS.items():
        assert slope == round(figures[f"slope_{scheme or 'vanilla'}"], 4)


def test_the_table_tells_the_costs_in_one_line_a_way():
    choice = compare(ALL, replace(USUAL, max_pls=0.012), 0.001)
    head, mirror, rows, full = str(choice).splitlines()
    assert head == "  way              seconds  samples redone  samples lost       PLS  AUC lost"
    assert mirror == "> mirror               2.0               0            50  0.010500     5e-07"
    assert rows.startswith(
        "  checkpoint rows      1.0               0           500  0.015000     5e-06  the portion"
    )
    assert full == "  full                 2.0           1,000             0  0.010000         0"
    assert "?" in str(compare([replace(FULL, pls=None, pls_added=None)], RecoveryPolicy()))


COSTS = st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0, 100.0, 1000.0])
PLS = st.sampled_from([None, 0.0, 0.01, 0.05, 0.2])
WAYS = st.lists(
    st.builds(
        lambda pls, added, **costs: Way(pls=pls, pls_added=None if pls is None else added, **costs),
        name=st.sampled_from(["in place", "mirror", "checkpoint rows", "full"]),
        rows_s=COSTS,
        redone=COSTS.map(int),
        lost=COSTS,
        lost_share=st.sampled_from([0.0, 0.5, 1.0]),
        pls=PLS,
        added=st.sampled_from([-0.01, 0.0, 0.01, 0.05]),
    ),
    min_size=1,
    max_size=5,
)
POLICIES = st.builds(
    RecoveryPolicy,
    max_pls=st.sampled_from([None, 0.0, 0.01, 0.1]),
    max_lost_share=st.sampled_from([0.4, 1.0]),
)
SAMPLE_S = st.sampled_from([None, 0.01, 1.0])


@given(WAYS, POLICIES, SAMPLE_S)
def test_a_way_over_a_limit_is_taken_only_where_no_way_is_within_all(ways, policy, sample_s):
    chosen = compare(ways, policy, sample_s).way
    allowed = [
        way
        for way in ways
        if way.lost_share <= policy.max_lost_share
        and (
            policy.max_pls is None
            or (way.pls_added is not None and way.pls_added <= 0)
            or (way.name == "full" if way.pls is None else way.pls <= policy.max_pls)
        )
    ]
    if allowed:
        assert facts(chosen) in map(facts, allowed)
    elif any(way.lost_share <= policy.max_lost_share for way in ways):
        assert chosen.lost_share <= policy.max_lost_share


@given(WAYS, POLICIES, SAMPLE_S)
def test_a_way_is_never_taken_if_another_is_as_good_in_everything_and_better_in_something(
    ways, policy, sample_s
):
    choice = compare(ways, policy, sample_s)
    chosen = costs(choice.way)
    for way in choice.ways:
        if way.objection is None and choice.way.objection is None and costs(way) != chosen:
            assert any(mine < its for mine, its in zip(chosen, costs(way), strict=True))


@given(WAYS, POLICIES, SAMPLE_S)
def test_one_way_is_chosen_the_first_of_equals_and_not_plainly_dearer_than_any(ways, policy, sample_s):
    choice = compare(ways, policy, sample_s)
    assert [facts(way) for way in choice.ways] == [facts(way) for way in ways]
    assert sum(way.is_chosen for way in choice.ways) == 1
    at = choice.ways.index(choice.way)
    assert facts(ways[at]) not in map(facts, ways[:at])
    assert compare([*ways, ways[at]], policy, sample_s).ways[at].is_chosen
    if sample_s is not None and choice.way.objection is None:
        spent = [w.rows_s + (w.redone + w.lost) * sample_s for w in choice.ways if w.objection is None]
        mine = choice.way.rows_s + (choice.way.redone + choice.way.lost) * sample_s
        assert mine <= max(min(spent) * PLAINLY, min(spent) + PLAINLY_S)


def facts(way):
    return replace(way, seconds=None, auc_lost=None, objection=None, is_chosen=False)


def costs(way):
    return way.rows_s, way.redone, way.lost, float("inf") if way.pls is None else way.pls
