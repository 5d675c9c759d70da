"""The experiment on what mirrors cost."""

import pytest

from experiments.mirror import run as mirror


def test_shares_are_taken_within_a_round():
    rounds = [{"none": s, "all": 1.1 * s, "every_8": 1.02 * s} for s in (0.1, 0.05, 0.2)]
    mirrors = [{"oldest": 2, "num_bytes": 600, "moments": 3}] * 3
    figures = mirror.figures_of([{"gbit": 25, "rounds": rounds, "mirrors": mirrors}])
    for edge in ("", "_low", "_high"):
        assert figures[f"mirror_step_share_25{edge}"] == pytest.approx(0.1)
        assert figures[f"mirror_step_share_every_8_25{edge}"] == pytest.approx(0.02)
    assert figures["mirror_bytes_per_step"] == 200
    assert (figures["mirror_age_steps_25"], figures["step_s_25"]) == (2, 0.1)


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("links", "forks")
def test_quick_run_sends_moments(run_quick):
    figures = run_quick(mirror.main, "mirror")["figures"]
    assert figures["mirror_bytes_per_step"] > 1000
    assert figures["mirror_age_steps_25"] >= 1
    assert figures["mirror_step_share_25_low"] <= figures["mirror_step_share_25_high"]
