import pytest

from dlrm.comm.autotune.candidates import (
    MAX_TIMED,
    MAX_TRIED,
    ExchangeEstimate,
    _shortlist,
    decide,
    describe,
    finalists,
)


def estimate(name, predicted_s, timed_s=None, lossless=False):
    kind = "lossless" if lossless else "sparse" if "sparse" in name else "encoded"
    return ExchangeEstimate(
        name=name,
        kind=kind,
        sent_bytes=1e6,
        predicted_s=predicted_s,
        timed_s=timed_s,
    )


def ring(timed_s):
    return estimate("ring", 1.0, timed_s, lossless=True)


def test_a_lossy_exchange_that_saves_enough_is_chosen():
    chosen, estimates = decide([ring(1.0), estimate("sparse", 0.2, 0.3)], {0: 2.0, 1: 1.3})
    assert chosen == 1
    assert estimates[1].reason == "chosen: steps are 35.0% shorter than with the best dense one"
    assert estimates[0].reason == "+53.8%"
    assert [each.step_s for each in estimates] == [2.0, 1.3]


SPARSE = estimate("sparse", 0.2, 0.3)


@pytest.mark.parametrize(
    ("other", "tried_s", "chosen", "reason"),
    [
        (SPARSE, {0: 1.0, 1: 0.985}, 0, "nothing else makes steps more than 2% shorter"),
        (estimate("tree", 1.0, 0.01, lossless=True), {0: 1.0, 1: 0.999}, 1, "nothing else makes"),
        (SPARSE, {1: 1.0, 2: 0.995}, 2, "the shortest steps"),
    ],
    ids=["a lossy one must save enough", "a lossless one need not", "dense ones are far slower"],
)
def test_the_fastest_is_chosen_if_it_is_worth_it(other, tried_s, chosen, reason):
    found, estimates = decide([ring(1.0), other, SPARSE], tried_s)
    assert found == chosen
    assert estimates[chosen].reason.startswith(f"chosen: {reason}")


def test_only_tried_candidates_are_chosen():
    chosen, estimates = decide([ring(1.0), estimate("unlikely", 9.0), estimate("slow", 1.0, 5.0)], {0: 2.0})
    assert chosen == 0
    assert estimates[0].reason == "chosen: nothing else may be worth it"
    table = describe(estimates).splitlines()
    assert len(table) == 4
    assert table[1].split()[:8] == ["ring", "1.00", "1,000.00", "ms", "1,000.00", "ms", "2,000.00", "ms"]
    assert table[2].split() == ["unlikely", "1.00", "9,000.00", "ms", "predicted", "to", "be", "slower"]
    assert "slower by itself" in table[3]


def test_no_lossy_candidate_is_tried_where_the_exchange_is_a_small_share():
    assert finalists([ring(0.01), estimate("sparse", 0.2, 0.001)], rest_of_step_s=1.0) == [0]
    assert finalists([ring(0.1), estimate("sparse", 0.2, 0.001)], rest_of_step_s=1.0) == [0, 1]


def test_candidates_that_make_steps_clearly_longer_are_not_tried():
    slow, tree = estimate("sparse", 1.0, 0.9), estimate("tree", 1.0, 2.2, lossless=True)
    quick = estimate("sparse int8", 1.0, 0.2)
    assert finalists([ring(2.0), tree, slow, quick], rest_of_step_s=1.0) == [3]
    assert finalists([ring(2.0), tree, slow, quick], rest_of_step_s=4.0) == [3, 2]
    assert finalists([ring(2.0), tree, slow, quick], rest_of_step_s=8.0) == [0, 3, 2, 1]
    assert finalists([ring(1.0), estimate("sparse", 1.0, 1.1)], rest_of_step_s=8.0) == [0]


def test_few_are_tried_and_the_best_dense_one_among_them():
    many = [estimate(f"sparse {each}", 1.0, 0.5 + each / 100) for each in range(MAX_TRIED + 2)]
    found = finalists([*many, ring(0.9)], rest_of_step_s=10.0)
    assert found == [len(many), *range(MAX_TRIED - 1)]


@pytest.mark.parametrize("dense_s", [0.9, 50.0])
def test_few_are_timed_and_always_the_best_dense_ones(dense_s):
    estimates = [estimate(f"sparse {i}", 1.0 + 0.1 * i) for i in range(MAX_TIMED + 2)]
    estimates += [estimate("far sparse", 40.0)]
    estimates += [estimate("tree", 1.5 * dense_s, lossless=True), estimate("ring", dense_s, lossless=True)]
    estimates += [estimate("slow", 3 * dense_s, lossless=True)]
    timed = [estimates[index].name for index in _shortlist(estimates)]
    assert timed == ["ring", "tree", *(f"sparse {i}" for i in range(MAX_TIMED))]


def test_lossy_candidates_that_are_predicted_far_slower_are_not_timed():
    assert _shortlist([estimate("sparse", 2.1), estimate("ring", 1.0, lossless=True)]) == [1]


def test_other_candidates_are_not_compared_with_encoded_ones():
    estimates = [estimate("ring int8", 0.3), estimate("ring", 1.0, lossless=True), estimate("sparse", 0.7)]
    assert sorted(_shortlist(estimates)) == [0, 1, 2]
    assert 2 not in _shortlist([*estimates[:2], estimate("sparse", 2.1)])


def test_encoded_and_sparse_candidates_are_timed_independently():
    estimates = [estimate("ring", 1.9, lossless=True), estimate("ring int8", 1.5), estimate("ring bf16", 1.7)]
    estimates += [estimate(f"sparse {i}", 1.0) for i in range(MAX_TIMED)]
    assert len(_shortlist(estimates)) == len(estimates)
