import pytest

from dlrm.comm.planner import MAX_TIMED, Estimate, _shortlist, decide


def estimate(name, predicted_s, timed_s=None, lossless=False):
    return Estimate(name=name, is_lossless=lossless, sent_bytes=1e6, predicted_s=predicted_s, timed_s=timed_s)


def names(plan):
    return [each.name for each in plan.estimates]


def test_what_is_worth_it_is_chosen():
    plan = decide([estimate("ring", 1.0, 1.0, True), estimate("sparse", 0.2, 0.3)], rest_of_step_s=1.0)
    assert not plan.is_dense
    assert names(plan)[plan.chosen] == "sparse"
    assert plan.estimates[1].reason == "chosen: it saves 35.0 % of the step"
    assert plan.estimates[0].reason == "+35.0 % of the step; dense, 50.0 % of the step"


def test_where_the_exchange_is_a_small_share_the_answer_is_dense():
    plan = decide([estimate("ring", 1.0, 0.01, True), estimate("sparse", 0.2, 0.001)], rest_of_step_s=1.0)
    assert plan.is_dense
    assert "dense, 1.0 % of the step: chosen" in plan.estimates[0].reason


def test_among_lossless_ones_the_fastest_is_chosen_however_little_it_saves():
    timed = [estimate("ring", 1.0, 0.011, True), estimate("tree", 1.0, 0.010, True)]
    plan = decide(timed, rest_of_step_s=1.0)
    assert plan.chosen == 1


def test_what_was_not_timed_is_not_chosen():
    plan = decide([estimate("ring", 1.0, 1.0, True), estimate("unlikely", 9.0)], rest_of_step_s=0.0)
    assert plan.chosen == 0
    table = plan.describe().splitlines()
    assert len(table) == 3
    assert "1,000.00 ms" in table[1]
    assert table[2].split() == ["unlikely", "1.00", "9,000.00", "ms"]


@pytest.mark.parametrize("dense_s", [0.9, 50.0])
def test_few_are_timed_and_always_the_best_dense_ones(dense_s):
    estimates = [estimate(f"sparse {i}", 1.0 + 0.1 * i) for i in range(MAX_TIMED + 2)]
    estimates += [estimate("far", 40.0)]
    estimates += [estimate("tree", 1.5 * dense_s, lossless=True), estimate("ring", dense_s, lossless=True)]
    estimates += [estimate("slow", 3 * dense_s, lossless=True)]
    timed = [estimates[index].name for index in _shortlist(estimates)]
    assert timed == ["ring", "tree", *(f"sparse {i}" for i in range(MAX_TIMED))]


def test_what_is_lossy_and_predicted_to_be_far_slower_is_not_timed():
    assert _shortlist([estimate("sparse", 2.1), estimate("ring", 1.0, lossless=True)]) == [1]
