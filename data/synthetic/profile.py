"""Statistics of Criteo's columns: missing values and the distribution of the integers.

Round figures from memory of Criteo Kaggle's training file (share of empty fields, median and mean of
each integer), not measured and not checked against a source: take them as plausible, not as facts.
Terabyte orders its columns differently; both presets share these figures.
"""

from typing import Final

DENSE_MISSING: Final = (
    0.454, 0.0, 0.215, 0.217, 0.026, 0.224, 0.043, 0.0005, 0.043, 0.454, 0.043, 0.765, 0.217,
)  # fmt: skip
"""Share of samples without a value, for each integer."""

CATEGORY_MISSING: Final = (
    0.0, 0.0, 0.034, 0.034, 0.0, 0.121, 0.0, 0.0, 0.0, 0.0, 0.0, 0.034, 0.0,
    0.0, 0.0, 0.034, 0.0, 0.0, 0.440, 0.440, 0.034, 0.763, 0.0, 0.034, 0.440, 0.440,
)  # fmt: skip
"""Share of samples without a value, for each category."""

DENSE_MEDIAN: Final = (1.5, 4.5, 6.5, 4.5, 2813.0, 32.5, 3.5, 7.5, 38.5, 1.2, 1.5, 0.5, 4.5)
"""Median of the log-normal that is rounded down to give each integer."""

DENSE_SIGMA: Final = (1.6, 2.0, 1.7, 1.1, 1.9, 1.6, 1.8, 1.1, 1.4, 0.7, 1.4, 1.5, 1.2)
"""Standard deviation of that log-normal's logarithm: heavy tails, as in real counts."""

DENSE_SHIFT: Final = (0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Added after rounding: Criteo's second integer is the one with negative values."""

DENSE_LIMIT: Final = 2_000_000_000
"""No integer is larger: Criteo's fit 32 bits, and a float32 holds this number exactly."""

CLICK_RATE: Final = 0.25
"""Share of clicks that the teacher is set to; Criteo Kaggle, after its subsampling, has 0.26."""

BEST_AUC: Final = 0.80
"""Best reachable AUC that the teacher is set to; about where published models end on Criteo Kaggle."""

TOP_SHARE: Final = 0.01
"""The most popular ids, as a share of a table ..."""

TOP_COVERAGE: Final = 0.75
"""... and the share of all accesses that they get (about what Criteo's large tables show)."""
