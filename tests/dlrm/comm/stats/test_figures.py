"""Figures are means over steps."""

from dlrm.comm.stats.figures import Tally


def test_a_tally_starts_over_when_it_is_taken():
    tally = Tally()
    assert tally.take("none yet") is None
    tally.exchange(10, 10, 100.0)
    tally.exchange(5, 10, 50.0)
    tally.waited(0.2)
    tally.step(1.0)
    figures = tally.take("ring", 4.0)
    assert (figures.steps, figures.kept_share, figures.sent_bytes) == (2, 0.75, 75.0)
    assert (figures.seconds, figures.step_seconds, figures.share) == (0.1, 1.0, 0.1)
    assert figures.residual_energy == 4.0
    assert tally.take("ring") is None
    tally.exchange(10, 10, 0.0)
    assert tally.take("ring").share is None  # step times are unknown
