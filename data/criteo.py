"""The Criteo click logs: columns, raw format, and the published table sizes.

One raw line is a label, 13 integers and 26 hexadecimal categories, separated by tabs; any field but the label
may be empty. Criteo Kaggle is one file of seven days; Criteo Terabyte is `day_0` .. `day_23`. All modules of
`data` name columns by the constants below. Parquet files have one column per feature, as a KeyedJaggedTensor
stores its values feature by feature.
"""

from typing import Final

NUM_DENSE: Final = 13
NUM_CATEGORIES: Final = 26
NUM_FIELDS: Final = 1 + NUM_DENSE + NUM_CATEGORIES

PREPARE: Final = "data.prepare"
"""Maker of data sets of these logs, in their provenance."""

LABEL: Final = "label"
DENSE_NAMES: Final = tuple(f"int_{i}" for i in range(NUM_DENSE))
CATEGORY_NAMES: Final = tuple(f"cat_{i}" for i in range(NUM_CATEGORIES))
COLUMN_NAMES: Final = (LABEL, *DENSE_NAMES, *CATEGORY_NAMES)

KAGGLE_CARDINALITIES: Final = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of each category in Criteo Kaggle, as facebookresearch/dlrm counts them (33,762,577)."""

TERABYTE_CARDINALITIES: Final = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10,
    2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip
"""Table sizes of Criteo Terabyte without a cap, as the TorchRec DLRM recipe lists them."""

TERABYTE_CAP: Final = 10_000_000
"""Maximum rows of a table in facebookresearch/dlrm's Terabyte benchmark (`--max-ind-range`)."""


def capped(cardinalities: tuple[int, ...], cap: int) -> tuple[int, ...]:
    """Cut each table size to at most `cap` rows."""
    return tuple(min(rows, cap) for rows in cardinalities)
