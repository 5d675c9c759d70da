"""Table sizes for ids made in one pass, and the collisions that they cause.

One pass cannot number the values, so that modulo and hash map some values to the same row and leave other
rows empty. Of n values in m rows, the collision probability of a value is 1 - (1 - 1/m)^(n - 1): 63 % with as
many rows as values, 1 % with a hundred times as many; three values in three rows have no collision in 2 of 9
cases. Tables of the published sizes thus have many collisions. Additional rows in the small tables cost
little and are the default; in the large tables only a vocabulary avoids collisions.
"""

import re
from collections.abc import Sequence
from typing import Final

from data.criteo import KAGGLE_CARDINALITIES, NUM_CATEGORIES, TERABYTE_CARDINALITIES
from data.jobs.location import Location
from data.prepare.parse.inputs import day_of
from data.schema.definition import MOST_ROWS

PUBLISHED: Final[dict[str, tuple[int, ...]]] = {
    "terabyte": TERABYTE_CARDINALITIES,
    "kaggle": KAGGLE_CARDINALITIES,
}
"""Values of each category in Criteo's data sets."""

ROOMY_ROWS: Final = 100_000
"""Default minimum of a table's rows. All tables together get 3 % (Terabyte) or 5 % (Kaggle) larger, and 1 %
of a thousand values collide."""


def published_as(raw: Sequence[Location]) -> str:
    """Data set of raw files by their names: a key of `PUBLISHED`.

    Raises:
        ValueError: the names suggest none.
    """
    if any(day_of(path) is not None for path in raw):
        return "terabyte"
    if len(raw) > 1:
        raise ValueError(
            "files that are not named day_N may be of any data set; give the rows of the tables with "
            f"--table-rows {', '.join(PUBLISHED)} or numbers of your own, or take --ids vocabulary"
        )
    return "kaggle"


def roomy_rows(published: str) -> tuple[int, ...]:
    """Return the rows of the 26 tables: one per value of the data set, but at least `ROOMY_ROWS`."""
    return tuple(max(num_values, ROOMY_ROWS) for num_values in PUBLISHED[published])


def parse_rows(text: str) -> tuple[int, ...]:
    """Rows of the 26 tables from a name of `PUBLISHED`, one number, or 26 with commas.

    Raises:
        ValueError: the text is none of these, or a table would be too small or too large.
    """
    rows = PUBLISHED.get(text)
    if rows is None:
        parts = text.split(",")
        if not all(re.fullmatch(r"\s*[0-9]+\s*", part) for part in parts) or len(parts) not in (
            1,
            NUM_CATEGORIES,
        ):
            raise ValueError(
                f"--table-rows is {', '.join(PUBLISHED)}, one number, or {NUM_CATEGORIES} numbers "
                f"separated by commas, not {text!r}"
            )
        rows = tuple(int(part) for part in parts) * (NUM_CATEGORIES // len(parts))
    if not all(1 <= count <= MOST_ROWS for count in rows):
        raise ValueError(f"a table has between 1 and {MOST_ROWS} rows; change --table-rows")
    return rows


def shared_values(num_values: int, rows: int) -> float:
    """Expected share of a table's values that collide with another one."""
    return 1 - (1 - 1 / rows) ** (num_values - 1)
