"""Times between failures, drawn from distributions that are given by their mean."""

import math
from collections.abc import Callable
from random import Random
from typing import Final, Literal

Distribution = Literal["exponential", "gamma", "weibull", "normal"]

Draw = Callable[[Random], float]
"""One time between failures, in units of the mean."""


def make_draw(distribution: Distribution, shape: float) -> Draw:
    """Draws with mean 1.

    Args:
        distribution: `exponential`: no memory, the shape is not used. `gamma` and `weibull`: their usual
            shape parameter; 1 is exponential, below 1 failures come in bursts, above 1 they come regularly.
            `normal`: a normal distribution of which only positive values are taken; the shape is its
            mean over its standard deviation before that.
        shape: positive.

    Raises:
        ValueError: there is no such distribution, or the shape is not a positive number.
    """
    if distribution not in _MAKERS:
        raise ValueError(f"distribution is {distribution!r}; choose one of {', '.join(_MAKERS)}")
    if not 0 < shape < math.inf:
        raise ValueError(f"shape is {shape}; it must be a positive number")
    return _MAKERS[distribution](shape)


def _exponential(_shape: float) -> Draw:
    return lambda random: random.expovariate(1.0)


def _gamma(shape: float) -> Draw:
    return lambda random: random.gammavariate(shape, 1 / shape)


def _weibull(shape: float) -> Draw:
    try:
        scale = 1 / math.gamma(1 + 1 / shape)
    except OverflowError:
        raise ValueError(f"shape is {shape}; such a Weibull distribution cannot be drawn from") from None
    return lambda random: random.weibullvariate(scale, shape)


def _normal(shape: float) -> Draw:
    # Of N(shape, 1) without what is not positive, the mean is shape + density(shape) / cumulative(shape).
    density = math.exp(-(shape**2) / 2) / math.sqrt(2 * math.pi)
    mean = shape + density / (0.5 * math.erfc(-shape / math.sqrt(2)))

    def draw(random: Random) -> float:
        while True:  # at least every second value is positive
            value = random.gauss(shape, 1.0)
            if value > 0:
                return value / mean

    return draw


_MAKERS: Final[dict[Distribution, Callable[[float], Draw]]] = {
    "exponential": _exponential,
    "gamma": _gamma,
    "weibull": _weibull,
    "normal": _normal,
}
