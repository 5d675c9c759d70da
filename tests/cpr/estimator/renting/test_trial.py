"""Short runs, as the choice of workers reads them."""

import pytest

from cpr.estimator.renting.samples import Target
from cpr.estimator.renting.step_time import TimedStep
from cpr.estimator.renting.trial import Trial, noise_of, samples_given, samples_to, traffic_of
from tests.cpr.estimator.renting.lines import LINK, NOISE_SCALE, TRAFFIC, run_lines, seconds

AUC = Target(metric="auc", value=0.7)


def trial(*arguments, **options):
    return Trial.of("run", run_lines(*arguments, **options))


def test_what_a_run_has_measured():
    found = trial(4, 1024, curve=[(5000, 0.6), (9000, 0.8)])
    taken_s = seconds(4, 1024)
    assert found.step == TimedStep(
        workers=4, batch=1024, seconds=pytest.approx(taken_s), link_bytes_per_s=LINK
    )
    assert found.curves["auc"] == [(5000, 0.6), (9000, 0.8)]
    assert str(found) == (
        f"run: 4 workers, batch 1,024, {1 / taken_s:.3g} steps/s, links of 1 Gb/s, "
        "noise scale 800 over 500 steps"
    )
    alone = trial(1, 512)
    assert (alone.noise, alone.step.link_bytes_per_s, alone.pooled_bytes) == (None, None, None)
    assert traffic_of([alone, found]) == TRAFFIC


def test_one_disturbed_line_changes_nothing():
    assert trial(2, 512, rates=[1.0, 100.0, 30.0, 100.0, 100.0]).step.seconds == 5.12


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "train it with train.measure_scaling=true"),
        (run_lines(2, 512, rates=[1.0, 2.0]), "run has 2 lines of metrics"),
        ([*run_lines(2, 512), *run_lines(1, 512)], "resumed with another number of workers"),
        ([{"kind": "scaling"}], "metrics of another version"),
        ([*run_lines(2, 512), {"kind": "train"}], "metrics of another version"),
        ([*run_lines(2, 512), *[{"kind": "train", "samples_per_s": -5.0}] * 30], "damaged metrics: -5 sam"),
    ],
)
def test_runs_without_what_is_needed(lines, message):
    with pytest.raises(ValueError, match=message):
        Trial.of("run", lines)


def test_the_longest_window_of_noise_counts():
    found = noise_of([trial(1, 512), trial(2, 512, steps=100, scale=7.0), trial(4, 512)])
    assert found.scale == pytest.approx(NOISE_SCALE)
    assert noise_of([trial(1, 512)]) is None
    with pytest.raises(ValueError, match=r"lost in their noise: train one for more steps, or with a larger"):
        noise_of([trial(2, 512, squared_norm=-1.0, scale=-900.0)])
    with pytest.raises(ValueError, match=r"too small to be measured: train one for more .* a smaller"):
        noise_of([trial(2, 512, squared_norm=1.0, scale=-900.0)])


def test_noise_over_few_steps_and_runs_that_differ_in_it_are_told():
    trials = [trial(2, 512, steps=50), trial(2, 1024, steps=40, scale=3 * NOISE_SCALE)]
    assert (
        "over 50 steps, which is rough over fewer than 100 steps: train" in samples_given(1e6, trials).source
    )
    assert (
        f"; runs differ in it, from {NOISE_SCALE:,.3g} to {3 * NOISE_SCALE:,.3g}"
        in samples_given(1e6, trials).source
    )
    source = samples_given(1e6, [trial(2, 512, steps=100)]).source
    assert source.endswith("samples over 100 steps")


def test_samples_as_given_are_those_of_the_smallest_batch():
    needed = samples_given(1e6, [trial(1, 2048), trial(2, 512)])
    assert needed.at(512) == pytest.approx(1e6)
    assert needed.critical_batch == pytest.approx(NOISE_SCALE)
    assert "noise scale of the dense parameters, 800 samples" in needed.source
    assert "taken to need as many" in samples_given(1e6, [trial(1, 512)]).source
    for impossible in (0, float("inf")):
        with pytest.raises(ValueError, match="more than 0"):
            samples_given(impossible, [trial(1, 512)])


def test_samples_to_a_target_by_runs_that_reached_it():
    reached = [trial(1, batch, curve=[(0, 0.5), (2 * samples, 0.9)]) for batch, samples in REACHED.items()]
    needed = samples_to(AUC, [*reached, trial(1, 8192, curve=[(100, 0.6)])])
    assert [needed.at(batch) for batch in REACHED] == pytest.approx(list(REACHED.values()))
    by_noise = samples_to(AUC, [reached[0], trial(2, 4096)])
    assert by_noise.at(512) == pytest.approx(REACHED[512])
    assert by_noise.critical_batch == pytest.approx(NOISE_SCALE)
    with pytest.raises(ValueError, match=r"reached auc=0.7; their best is 0.6: train one until it does"):
        samples_to(AUC, [trial(1, 512, curve=[(100, 0.6)]), trial(1, 1024)])


def test_a_run_that_had_reached_the_target_when_first_evaluated_says_not_when():
    early = trial(1, 512, curve=[(61_440, 0.75), (90_000, 0.8)])
    with pytest.raises(
        ValueError, match=r"run had reached auc=0.7 at some time before .* smaller train.evaluate_every"
    ):
        samples_to(AUC, [trial(1, 2048, curve=[(0, 0.5), (60_000, 0.9)]), early])


REACHED = {512: 30_000.0, 2048: 60_000.0}
"""Samples to an AUC of 0.7, half way between the two evaluations."""
