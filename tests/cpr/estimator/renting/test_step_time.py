"""The time of a step by workers and batch."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.estimator.renting.step_time import StepTime, TimedStep, fit_step_time
from cpr.estimator.renting.traffic import Traffic
from tests.cpr.estimator.renting.lines import LINK, TRAFFIC, seconds

CORNERS = [(1, 512), (1, 4096), (4, 512), (4, 4096), (2, 1024)]


def steps(sizes, link=LINK):
    return [
        TimedStep(
            workers=workers,
            batch=batch,
            seconds=seconds(workers, batch, link),
            link_bytes_per_s=link if workers > 1 else None,
        )
        for workers, batch in sizes
    ]


def test_bytes_of_a_step():
    """All-reduce of a ring, and of the embeddings of a table's worker those of the other workers' samples."""
    traffic = Traffic(dense_bytes=600.0, pooled_bytes=8.0)
    assert traffic.sent(1, 1000) == 0
    assert traffic.sent(4, 1000) == pytest.approx(2 * 3 / 4 * 600 + 1000 / 4 * 3 / 4 * 8)


def test_coefficients_and_times_are_recovered():
    model = fit_step_time(steps(CORNERS), TRAFFIC)
    found = (model.fixed_s, model.sample_s, model.worker_s, model.byte_s)
    assert found == pytest.approx((0.01, 2e-5, 0.001, 2e-9), rel=1e-6)
    assert model.num_coefficients == 4
    assert model.worst_error < 1e-9
    for workers, batch in product((1, 2, 3, 8), (256, 2048, 16_384)):
        assert model.seconds(workers, batch) == pytest.approx(seconds(workers, batch))
        assert model.seconds(workers, batch, 10 * LINK) == pytest.approx(seconds(workers, batch, 10 * LINK))


def test_links_that_are_faster_than_they_were_measured():
    """What was measured at that speed is predicted, and nothing takes less than no time."""
    measured = [replace(each, link_bytes_per_s=each.link_bytes_per_s and LINK / 2) for each in steps(CORNERS)]
    model = fit_step_time(measured, TRAFFIC)
    assert model.byte_s == pytest.approx(2e-9 - 1 / LINK)
    assert model.seconds(4, 2048) == pytest.approx(seconds(4, 2048))
    without_bytes = 0.01 + 2e-5 * 512 + 0.003
    assert model.seconds(4, 2048, 1e12) == pytest.approx(without_bytes)


def test_several_links_show_what_a_byte_takes_besides():
    model = fit_step_time([*steps(CORNERS), *steps([(2, 1024), (4, 4096)], link=9 * LINK)], TRAFFIC)
    assert model.byte_s == pytest.approx(2e-9)
    assert model.worst_error < 1e-9


positive = st.floats(1e-4, 1.0)


@given(st.tuples(positive, positive, positive, positive), st.floats(1e6, 1e10))
def test_planted_models_predict_what_was_not_measured(scales, link):
    fixed, sample, worker, byte = scales
    truth = StepTime(
        fixed_s=fixed,
        sample_s=sample / 4096,
        worker_s=worker,
        byte_s=byte / TRAFFIC.sent(4, 4096),
        traffic=TRAFFIC,
        link_bytes_per_s=link,
        steps=(),
    )
    measured = [
        TimedStep(workers=n, batch=b, seconds=truth.seconds(n, b), link_bytes_per_s=link) for n, b in CORNERS
    ]
    model = fit_step_time(measured, TRAFFIC)
    for size in product((1, 2, 4), (512, 1024, 4096)):
        # what all steps hardly feel, they cannot tell: a term of up to a twentieth may be missing
        assert model.seconds(*size) == pytest.approx(truth.seconds(*size), rel=0.06)


def test_runs_of_one_worker_predict_one_worker():
    model = fit_step_time(steps([(1, 512), (1, 4096)]), TRAFFIC)
    assert model.seconds(1, 1024) == pytest.approx(seconds(1, 1024))
    with pytest.raises(ValueError, match="give a run of two or more, too"):
        model.seconds(2, 1024)


def test_terms_that_runs_cannot_tell_apart_are_left_out():
    """Between one worker and two with one batch each, latency and bytes are the same thing."""
    model = fit_step_time(steps([(1, 512), (1, 4096), (2, 1024)]), TRAFFIC)
    assert (model.worker_s, model.num_coefficients, model.worst_error) == (0, 3, None)
    assert model.seconds(2, 1024) == pytest.approx(seconds(2, 1024))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(1, 512), (2, 1024)], "another run, with another data.global_batch_size"),
        ([(1, 512)], "another run, with another data.global_batch_size"),
    ],
)
def test_samples_of_a_worker_must_differ(sizes, message):
    with pytest.raises(ValueError, match=message):
        fit_step_time(steps(sizes), TRAFFIC)


def test_links_must_be_measured():
    with pytest.raises(ValueError, match=r"train it with train\.measure_scaling=true"):
        fit_step_time([*steps([(1, 512), (1, 1024)]), TimedStep(workers=2, batch=512, seconds=1.0)], TRAFFIC)


def test_what_is_outside_of_the_runs_is_told():
    model = fit_step_time(steps(CORNERS), TRAFFIC)
    assert not model.is_extrapolated(2, 4096)
    assert model.is_extrapolated(8, 4096)
    assert model.is_extrapolated(1, 8192)
    assert model.is_extrapolated(4, 256)
