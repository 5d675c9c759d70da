import pytest

from dlrm.comm import cost

ALPHA_S = 1e-3
BETA_S = 8 / 10e9


def test_an_example_of_resnet_18():
    # 8 ranks at 1 ms and 10 Gb/s, a tenth kept
    arguments = (ALPHA_S, BETA_S, 8, 46.76e6, 0.1)
    expected_s = {"all-gather": 55.4e-3, "ring": 34.8e-3, "tree": 42.7e-3}
    assert cost.sparse_sums_s(*arguments) == pytest.approx(expected_s, abs=0.05e-3)
    assert cost.winner(*arguments) == "ring"


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_the_winner_is_the_one_of_the_papers_inequalities(num_ranks):
    log_n = num_ranks.bit_length() - 1
    for kept in (1e-4, 1e-3, 1e-2, 0.1):
        for alpha_s in (1e-5, 1e-3, 0.1):
            size = 1e8 * kept * BETA_S / alpha_s
            ring_beats_gather = (1 - 1 / num_ranks - log_n / (2 * (num_ranks - 1))) * size > 1
            tree_beats_gather = ((num_ranks - 1) / log_n - 1.5) * size > 1
            found = cost.winner(alpha_s, BETA_S, num_ranks, 1e8, kept)
            assert (found != "all-gather") == (ring_beats_gather or tree_beats_gather)
