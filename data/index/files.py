"""Finds the Parquet files of a folder, and the day of each."""

import re
from collections.abc import Sequence
from typing import Final

from data.jobs.location import Location

DAY_KEY: Final = "day"
"""Key of folders whose values are the numbers of the days themselves."""
ENDING: Final = ".parquet"


def find_files(folder: Location) -> list[str]:
    """Paths of all Parquet files in a folder and its folders, relative to it, in natural order.

    Files and folders whose names begin with `_` or `.` are left out, as Spark and others do.

    Raises:
        ValueError: there is no Parquet file in the folder, or no such folder.
    """
    paths = folder.sizes()
    kept = [path for path in paths if path.lower().endswith(ENDING) and not re.search(r"(^|/)[_.]", path)]
    if not kept:
        raise ValueError(
            f"there is no file that ends in {ENDING} in {folder}; name the folder that holds them"
        )
    return sorted(kept, key=_natural)


def days_of(paths: Sequence[str]) -> dict[str, int]:
    """The day of each file, from its folders `KEY=VALUE`; without any, each file is a day of its own.

    The values of `day=D` are the days themselves. Those of other keys, or of several, are put in order and
    counted from 0.

    Raises:
        ValueError: files have other keys than others.
    """
    keys = {path: tuple(re.findall(r"([^/=]+)=([^/]*)/", path)) for path in paths}
    names = {tuple(name for name, _ in each): path for path, each in keys.items()}
    if len(names) > 1:
        one, other, *_ = names.values()
        raise ValueError(
            f"{one} and {other} lie in folders of different keys (KEY=VALUE), which tell the days; put all "
            "files into folders of one kind, e.g. day=0, day=1"
        )
    values = [value for each in keys.values() for _, value in each]
    if [*names] == [(DAY_KEY,)] and all(re.fullmatch("[0-9]{1,9}", value) for value in values):
        return {path: int(each[0][1]) for path, each in keys.items()}
    moments = {path: _natural("/".join(value for _, value in each) or path) for path, each in keys.items()}
    numbers = {moment: day for day, moment in enumerate(sorted(set(moments.values())))}
    return {path: numbers[moment] for path, moment in moments.items()}


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """Sort key by which `part-10` comes after `part-9`."""
    return tuple((int(digits or -1), letters) for digits, letters in re.findall(r"(\d*)(\D*)", text))
