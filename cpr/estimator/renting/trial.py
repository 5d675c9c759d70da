"""A short run of `dlrm.train` with `train.measure_scaling`, as the choice of workers reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import mean, median
from typing import Any, Final

from cpr.estimator.renting.noise import GradientNoise
from cpr.estimator.renting.samples import LOWER_IS_BETTER, SamplesNeeded, Target
from cpr.estimator.renting.step_time import TimedStep
from cpr.estimator.renting.traffic import Traffic
from cpr.humanize import count_text

LEAST_LINES: Final = 3
"""Lines of metrics that a trial needs; the first one is left out, as its steps allocate memory."""

NOISE_STEPS: Final = 100
"""Steps over which gradient noise must be measured not to be called rough."""

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a run has measured."""

    name: str
    step: TimedStep
    dense_bytes: float
    pooled_bytes: float | None
    """See `Traffic`; None: one worker, which sends nothing."""
    noise: GradientNoise | None
    """Of the last steps; None: one worker."""
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Learning curve by metric: samples and value of each evaluation."""

    def __str__(self) -> str:
        step, link, noise = self.step, "", ""
        if step.link_bytes_per_s is not None:
            link = f", links of {8e-9 * step.link_bytes_per_s:.3g} Gb/s"
        if self.noise is not None and self.noise.scale is not None:
            noise = f", noise scale {self.noise.scale:,.3g} over {count_text(self.noise.steps, 'step')}"
        return (
            f"{self.name}: {count_text(step.workers, 'worker')}, batch {step.batch:,}, "
            f"{1 / step.seconds:.3g} steps/s{link}{noise}"
        )

    @classmethod
    def of(cls, name: str, lines: Sequence[Line]) -> "Trial":
        """From the lines of a run's `metrics.jsonl`.

        Raises:
            ValueError: something is missing there; says how to measure it.
        """
        try:
            return _trial(name, lines)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{name} has metrics of another version ({error!r}): train it again with this one"
            ) from error


def _trial(name: str, lines: Sequence[Line]) -> Trial:
    trained = [line for line in lines if line["kind"] == "train"]
    scaling = [line for line in lines if line["kind"] == "scaling"]
    if not scaling:
        raise ValueError(
            f"{name} has not measured how it scales: train it with train.measure_scaling=true, for "
            f"{LEAST_LINES} times train.log_every_steps steps at least"
        )
    sizes = sorted({(line["workers"], line["global_batch"]) for line in scaling})
    if len(sizes) > 1:
        raise ValueError(
            f"{name} was resumed with another number of workers or another batch "
            f"({', '.join(f'{workers} workers, batch {batch}' for workers, batch in sizes)}): give a run "
            "of one size"
        )
    if len(trained) < LEAST_LINES:
        raise ValueError(
            f"{name} has {len(trained)} lines of metrics, and its first one does not count: train it for "
            f"{LEAST_LINES} times train.log_every_steps steps at least"
        )
    ((workers, batch),), last = sizes, scaling[-1]
    rate = median(line["samples_per_s"] for line in trained[1:])
    if not 0 < rate < inf:
        raise ValueError(f"{name} has damaged metrics: {rate:g} samples/s. Leave it out, or train it again")
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    return Trial(
        name=name,
        step=TimedStep(
            workers=workers,
            batch=batch,
            seconds=batch / rate,
            link_bytes_per_s=last.get("link_bytes_per_s"),
        ),
        dense_bytes=last["dense_bytes"],
        pooled_bytes=last.get("pooled_bytes"),
        noise=None if workers == 1 else _noise(workers, batch, last["noise"]),
        curves={
            metric: [(line["samples"], line[metric]) for line in evaluations if line.get(metric) is not None]
            for metric in LOWER_IS_BETTER
        },
    )


def traffic_of(trials: Sequence[Trial]) -> Traffic:
    """What the steps of these trials send: as counted in the one with the most workers."""
    largest = max(trials, key=lambda trial: trial.step.workers)
    return Traffic(dense_bytes=largest.dense_bytes, pooled_bytes=largest.pooled_bytes or 0.0)


def noise_of(trials: Sequence[Trial]) -> GradientNoise | None:
    """Gradient noise of the trial with the longest window; None: none has measured it.

    Raises:
        ValueError: the windows were too short.
    """
    measured = [trial.noise for trial in trials if trial.noise is not None]
    if not measured:
        return None
    known = [noise for noise in measured if noise.scale is not None]
    if not known:
        is_lost = all(noise.squared_norm <= 0 for noise in measured)
        why, size = (
            ("gradients of these runs are lost in their noise", "larger")
            if is_lost
            else ("noise of these runs' gradients is too small to be measured", "smaller")
        )
        raise ValueError(f"the {why}: train one for more steps, or with a {size} data.global_batch_size")
    return max(known, key=lambda noise: noise.steps)


def samples_given(samples: float, trials: Sequence[Trial]) -> SamplesNeeded:
    """Samples by batch, from those that the smallest batch of these trials needs, and their gradient noise.

    Raises:
        ValueError: the number is not positive, or the windows of noise were too short.
    """
    if not 0 < samples < inf:
        raise ValueError(f"the samples are {samples:g}; give how many training takes, more than 0")
    batch, noise = min(trial.step.batch for trial in trials), noise_of(trials)
    source = f"{samples:.3g} with batch {batch:,}, as given; {_by_noise(noise, trials)}"
    return SamplesNeeded.by_noise(batch, samples, noise.scale if noise else None, source)


def samples_to(target: Target, trials: Sequence[Trial]) -> SamplesNeeded:
    """Samples to a target by batch: fitted to the trials that reached it, or by noise if all had one batch.

    Raises:
        ValueError: none has reached it, one had done so when it was first evaluated, or the windows of noise
            were too short.
    """
    found: dict[int, list[float]] = {}
    for trial in trials:
        curve = trial.curves[target.metric]
        samples = target.reached_after(curve)
        if samples is None:
            continue
        if samples <= curve[0][0]:
            raise ValueError(
                f"{trial.name} had reached {target} at some time before it was first evaluated, after "
                f"{samples:.3g} samples: train it with a smaller train.evaluate_every_steps, or give a "
                "target that is farther away"
            )
        found.setdefault(trial.step.batch, []).append(samples)
    reached = {batch: mean(each) for batch, each in sorted(found.items())}
    if not reached:
        evaluated = [point for trial in trials for point in trial.curves[target.metric]]
        values = f"; their best is {target.best_of(evaluated):g}" if evaluated else ""
        raise ValueError(
            f"none of these runs has reached {target}{values}: train one until it does, with "
            "train.evaluate_every_steps, or give --samples"
        )
    listed = ", ".join(f"{samples:.3g} with batch {batch:,}" for batch, samples in reached.items())
    if len(reached) > 1:
        return SamplesNeeded.by_runs(reached, f"fitted to runs that reached {target}: {listed}")
    ((batch, samples),) = reached.items()
    noise = noise_of(trials)
    source = f"{listed}, to {target}; {_by_noise(noise, trials)}"
    return SamplesNeeded.by_noise(batch, samples, noise.scale if noise else None, source)


def _by_noise(noise: GradientNoise | None, trials: Sequence[Trial]) -> str:
    if noise is None or noise.scale is None:
        return (
            "every batch is taken to need as many, as no run of several workers has measured gradient noise"
        )
    rough = ""
    if noise.steps < NOISE_STEPS:
        rough = f", which is rough over fewer than {NOISE_STEPS:,} steps: train a run for longer"
    others = [trial.noise.scale for trial in trials if trial.noise and trial.noise.scale]
    if max(others) > 2 * min(others):
        rough += f"; runs differ in it, from {min(others):,.3g} to {max(others):,.3g}"
    return (
        f"with other batches by the gradient noise scale of the dense parameters, {noise.scale:,.3g} samples "
        f"over {count_text(noise.steps, 'step')}{rough}"
    )


def _noise(workers: int, batch: int, figures: Mapping[str, Any]) -> GradientNoise:
    return GradientNoise(
        workers=workers,
        batch=batch,
        steps=figures["steps"],
        local=figures["local"],
        averaged=figures["averaged"],
    )
