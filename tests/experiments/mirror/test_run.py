"""The experiment on what mirrors cost."""

import pytest

from experiments.mirror import run as mirror


def turn(step_s, age_steps=0):
    return {"step_s": step_s, "cpu_s": 2 * step_s, "bytes_per_step": 600 * age_steps, "age_steps": age_steps}


def test_shares_are_taken_within_a_round():
    steps_s = (0.1, 0.05, 0.2)
    rounds = [{"none": turn(s), "all": turn(1.1 * s, 2), "priority": turn(1.02 * s, 9)} for s in steps_s]
    cell = {"job": "tiny", "nodes": 4, "gbit": 25}
    figures = mirror.figures_of([{**cell, "rounds": rounds}])
    for edge in ("", "_low", "_high"):
        assert figures[f"mirror_step_share_tiny_nodes_4_25{edge}"] == pytest.approx(0.1)
        assert figures[f"mirror_step_share_priority_tiny_nodes_4_25{edge}"] == pytest.approx(0.02)
    assert figures["mirror_cpu_s_tiny_nodes_4_25"] == pytest.approx(0.02)
    assert figures["mirror_bytes_per_step_tiny_nodes_4_25"] == 1200
    assert figures["mirror_age_steps_tiny_nodes_4_25"] == 2
    assert figures["step_s_tiny_nodes_4_25"] == 0.1


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("links", "forks")
def test_quick_run_sends_moments(run_quick):
    figures = run_quick(mirror.main, "mirror")["figures"]
    assert figures["mirror_bytes_per_step_25"] > figures["mirror_bytes_per_step_priority_25"] > 100
    assert figures["mirror_age_steps_25"] >= 1
    assert figures["mirror_age_steps_priority_25"] >= 8
    assert figures["mirror_step_share_25_low"] <= figures["mirror_step_share_25_high"]
