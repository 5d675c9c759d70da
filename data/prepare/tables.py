"""How many rows the tables of ids made in one pass have, and what that costs.

One pass cannot number the values, because it does not know them: modulo and hash give a value a row
whatever the others have, so some values share a row while other rows stay empty. Of n values in m
rows, a value shares its row with the probability 1 - (1 - 1/m)^(n - 1): 63 % if there are as many rows
as values, 1 % if there are a hundred times as many; three values in three rows stay apart in 2 cases
of 9. So tables of the published sizes merge much. Room in the small ones costs next to nothing, and who
does not say how many rows the tables have gets that; values of the large ones a vocabulary alone keeps apart.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from data.criteo import KAGGLE_CARDINALITIES, NUM_CATEGORIES, TERABYTE_CARDINALITIES
from data.prepare.parse.inputs import day_of

PUBLISHED: Final[dict[str, tuple[int, ...]]] = {
    "terabyte": TERABYTE_CARDINALITIES,
    "kaggle": KAGGLE_CARDINALITIES,
}
"""Values of each category in Criteo's data sets."""

ROOMY_ROWS: Final = 100_000
"""Rows that a table has at least unless the user says how many. That makes all tables together 3 % (Terabyte)
or 5 % (Kaggle) larger, and of a thousand values 1 % share a row."""

_MAX_ROWS: Final = 2**31 - 1


def published_as(raw: Sequence[Path]) -> str:
    """Whose published sizes fit the raw files, by their names: a key of `PUBLISHED`.

    Raises:
        ValueError: the names do not tell.
    """
    if any(day_of(path) is not None for path in raw):
        return "terabyte"
    if len(raw) > 1:
        raise ValueError(
            "files that are not named day_N may be of any data set; say how many rows the tables have, with "
            f"--table-rows {', '.join(PUBLISHED)} or numbers of your own, or take --ids vocabulary"
        )
    return "kaggle"


def roomy_rows(published: str) -> tuple[int, ...]:
    """Rows of the 26 tables for the values of a data set, with room in the small ones."""
    return tuple(max(num_values, ROOMY_ROWS) for num_values in PUBLISHED[published])


def parse_rows(text: str) -> tuple[int, ...]:
    """Rows of the 26 tables from a name of `PUBLISHED`, one number, or 26 with commas.

    Raises:
        ValueError: it is something else, or a table would be too small or too large.
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
    if not all(1 <= count <= _MAX_ROWS for count in rows):
        raise ValueError(f"a table has between 1 and {_MAX_ROWS} rows; change --table-rows")
    return rows


def shared_values(num_values: int, rows: int) -> float:
    """Share of a table's values that are expected to share their row with another one."""
    return 1 - (1 - 1 / rows) ** (num_values - 1)
