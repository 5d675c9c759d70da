"""The experiment on the cost of tracking updated rows."""

import pytest

from experiments.tracking import run as tracking


def rounds(**shares):
    """Rounds on a machine whose speed varies."""
    return [
        {"none": speed, **{name: speed * (1 + share) for name, share in shares.items()}}
        for speed in (0.05, 0.1, 0.04, 0.07)
    ]


def choosing(choose_s, bytes_per_row):
    return {
        scheme: {"choose_s": choose_s, "rows": 1, "bytes_per_row": bytes_per_row}
        for scheme in tracking.SCHEMES
    }


CALLS = {"mfu": 0.001, "mfu_all": 0.004, "ssu": 0.002}


def test_shares_are_taken_within_a_round():
    shares = {"mfu": 0.003, "mfu_all": 0.01, "ssu": 0.005, "scar": 0.0, "torchrec": 0.06}
    rows = [
        {"rounds": rounds(**shares)[:2], "choosing": choosing(0.2, 4), "calls": CALLS},
        {"rounds": rounds(**shares)[2:], "choosing": choosing(0.4, 4), "calls": CALLS},
    ]
    figures = tracking.figures_of(rows, seed=1)
    for name, share in shares.items():
        for edge in ("", "_low", "_high"):
            assert figures[f"{name}_step_share{edge}"] == pytest.approx(share)
    assert figures["mfu_calls_share"] == figures["mfu_calls_share_high"] == 0.001
    assert figures["mfu_bytes_per_row"] == 4
    assert figures["ssu_choose_s"] == pytest.approx(0.3)
    assert figures["step_s"] == pytest.approx(0.06)


def test_stalls_are_cut_and_rare_long_steps_count_in_full():
    ratios = [1.0] * 18 + [1.1, 30.0]
    rows = [{"none": 0.04, **dict.fromkeys(tracking.CONTENDERS[1:], 0.04 * ratio)} for ratio in ratios]
    figures = tracking.figures_of([{"rounds": rows, "choosing": choosing(1, 1), "calls": CALLS}], seed=1)
    assert figures["mfu_step_share"] == pytest.approx((1.1 * 1.5) ** (1 / 20) - 1)


def test_interval_contains_the_mean_and_narrows_with_more_rounds():
    few = [{"none": 1.0, **dict.fromkeys(tracking.CONTENDERS[1:], 1.001**k)} for k in range(9)]
    one = [{"rounds": few, "choosing": choosing(1, 1), "calls": CALLS}]
    wide, narrow = (tracking.figures_of(rows, seed=1) for rows in (one, one * 20))
    for figures in (wide, narrow):
        assert figures["mfu_step_share"] == pytest.approx(1.001**4 - 1)
        assert figures["mfu_step_share_low"] <= 1.001**4 - 1 <= figures["mfu_step_share_high"] + 1e-9
    width = {id(f): f["mfu_step_share_high"] - f["mfu_step_share_low"] for f in (wide, narrow)}
    assert width[id(narrow)] < width[id(wide)]


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("forks")
def test_quick_run_measures_every_tracker(run_quick):
    figures = run_quick(tracking.main, "tracking")["figures"]
    assert figures["mfu_bytes_per_row"] == 4
    assert figures["ssu_bytes_per_row"] == pytest.approx(0.5, abs=0.001)
    assert figures["scar_bytes_per_row"] == 4 * 64
    assert {f"{name}_step_share" for name in tracking.CONTENDERS[1:]} <= figures.keys()
    assert all(0 < figures[f"{name}_calls_share"] < 1 for name in tracking.CALLED)
