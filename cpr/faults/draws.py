"""Random times between failures, from distributions given by their mean."""

import math
from collections.abc import Callable
from random import Random
from typing import Literal, get_args

Distribution = Literal["exponential", "gamma", "weibull", "normal"]

Draw = Callable[[Random], float]
"""Draws one time between failures, in units of the mean."""


def make_draw(distribution: Distribution, shape: float) -> Draw:
    """A function that draws times with mean 1.

    Args:
        distribution: `exponential`: memoryless, the shape is not used. `gamma` and `weibull`: with their
            usual shape parameter; 1 is exponential, below 1 failures come in bursts, above 1 regularly.
            `normal`: the positive part of a normal distribution, whose mean over its standard deviation
            before truncation is the shape.
        shape: positive.

    Raises:
        ValueError: the distribution is unknown, or the shape is not a positive number.
    """
    if distribution not in get_args(Distribution):
        raise ValueError(
            f"distribution is {distribution!r}; choose one of {', '.join(get_args(Distribution))}"
        )
    if not 0 < shape < math.inf:
        raise ValueError(f"shape is {shape}; it must be a positive number")
    if distribution == "exponential":
        return lambda random: random.expovariate(1.0)
    if distribution == "gamma":
        return lambda random: random.gammavariate(shape, 1 / shape)
    if distribution == "weibull":
        try:
            scale = 1 / math.gamma(1 + 1 / shape)
        except OverflowError:
            raise ValueError(f"shape is {shape}; such a Weibull distribution cannot be drawn from") from None
        return lambda random: random.weibullvariate(scale, shape)
    return _truncated_normal(shape)


def _truncated_normal(shape: float) -> Draw:
    # The positive part of N(shape, 1) has the mean shape + density(shape) / cumulative(shape).
    density = math.exp(-(shape**2) / 2) / math.sqrt(2 * math.pi)
    mean = shape + density / (0.5 * math.erfc(-shape / math.sqrt(2)))

    def draw(random: Random) -> float:
        while True:  # at least every second value is positive
            value = random.gauss(shape, 1.0)
            if value > 0:
                return value / mean

    return draw
