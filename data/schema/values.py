"""Reads the values of a column, of whatever type, as numbers, texts or times.

A value has one meaning in every format: a text and a typed value that look alike are read alike, so that CSV,
JSON lines and Parquet of the same rows give the same data set. Every function returns a column without the
values it could not read, and a mask of those; a type that cannot be meant is the user's mistake.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.schema.definition import TIME_UNITS, Time

Mask = NDArray[np.bool_]
Reader = Callable[[pl.Series], tuple[pl.Series, Mask]]
"""Gives the values of a column, and a mask of those that cannot be read."""

_EXACT: Final = 2**53
"""Whole numbers up to this are exact in float64."""
_WHOLE: Final = r"^([+-]?[0-9]+)\.0*$"
_ISO_FORMATS: Final = tuple(
    (f"%Y-%m-%d{blank}%H:%M{seconds}{zone}", bool(zone))
    for blank in " T"
    for seconds in (":%S%.f", "")
    for zone in ("", "%#z")
)
_LABELS: Final = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}


def known(series: pl.Series, missing: tuple[str, ...]) -> pl.Series:
    """The column with null for texts that stand for missing values; other types as far as texts are alike."""
    kind = series.dtype
    if isinstance(kind, pl.Categorical | pl.Enum):
        series = series.cast(pl.String)
    elif kind == pl.Binary:
        series = series.cast(pl.String, strict=False)
    if series.dtype != pl.String:
        return series
    return series.set(series.is_in(list(missing)).fill_null(False), None)


def labels(series: pl.Series, at_least: float | None) -> tuple[pl.Series, Mask]:
    """0 or 1 (UInt8) for each value; a missing one is bad."""
    if at_least is not None:
        found, bad = numbers(series)
        return (found >= at_least).cast(pl.UInt8), bad | _mask(found.is_null())
    if series.dtype == pl.String:
        found = series.str.to_lowercase().replace_strict(_LABELS, default=None, return_dtype=pl.UInt8)
    else:
        found, _ = numbers(series)
        found = found.set(~found.is_in([0.0, 1.0]).fill_null(False), None).cast(pl.UInt8)
    return found, _mask(found.is_null())


def numbers(series: pl.Series) -> tuple[pl.Series, Mask]:
    """Float64, null for missing and NaN; infinite values are bad."""
    _refuse(series, series.dtype.is_numeric() or series.dtype in (pl.String, pl.Boolean), "numbers")
    found = series.cast(pl.Float64, strict=False)
    bad = found.is_infinite().fill_null(False) | (series.is_not_null() & found.is_null())
    found = found.set(~found.is_finite().fill_null(True), None)
    return found, _mask(bad)


def integers(series: pl.Series) -> tuple[pl.Series, Mask]:
    """Int64, also of texts and floats of whole numbers."""
    kind = series.dtype
    _refuse(series, kind.is_numeric() or kind in (pl.String, pl.Boolean), "integers")
    if kind.is_float() or kind.is_decimal():
        wide = series.cast(pl.Float64).fill_nan(None)
        whole = (wide == wide.floor()) & (wide.abs() <= _EXACT)
        found = wide.set(~whole.fill_null(True), None).cast(pl.Int64)
        return found, _mask(wide.is_not_null() & found.is_null())
    found = series.cast(pl.Int64, strict=False)
    bad = series.is_not_null() & found.is_null()
    if kind == pl.String and bad.any():
        found = series.str.replace(_WHOLE, "$1").cast(pl.Int64, strict=False)
        bad = series.is_not_null() & found.is_null()
    return found, _mask(bad)


def hex_numbers(series: pl.Series) -> tuple[pl.Series, Mask]:
    """Int64 in [0, 2^32), of hexadecimal texts or of numbers."""
    if series.dtype == pl.String:
        found = series.str.to_integer(base=16, dtype=pl.Int64, strict=False)
    else:
        found, _ = integers(series)
    found = found.set(~found.is_between(0, 2**32 - 1).fill_null(True), None)
    return found, _mask(series.is_not_null() & found.is_null())


def texts(series: pl.Series) -> tuple[pl.Series, Mask]:
    """Texts; of integers, dates and booleans as CSV has them."""
    kind = series.dtype
    good = kind == pl.String or kind.is_integer() or kind in (pl.Boolean, pl.Date, pl.Null)
    advice = 'texts (for whole numbers that are stored as floats take type = "integer")'
    _refuse(series, good, advice)
    return series.cast(pl.String), np.zeros(len(series), bool)


def times(series: pl.Series, time: Time) -> tuple[pl.Series, Mask]:
    """Int64 microseconds since 1970 in UTC, or the number of the day; a missing time is bad."""
    kind = series.dtype
    if isinstance(kind, pl.Datetime) or kind == pl.Date:
        if time.unit:
            raise ValueError(f"column {series.name!r} holds {kind}; leave out `unit` of [time]")
        found = series.cast(pl.Datetime("us")).cast(pl.Int64)
    elif time.unit:
        found = _numeric_times(series, TIME_UNITS[time.unit])
        if time.unit == "day":
            found = found.set((found < 0).fill_null(False), None)
    else:
        whole = kind.is_integer() and bool(time.format)
        advice = "timestamps, dates or texts (of numbers say the `unit` in [time], of digits a `format`)"
        _refuse(series, kind == pl.String or whole, advice)
        found = _text_times(series.cast(pl.String), time.format).cast(pl.Int64)
    return found, _mask(found.is_null())


def _numeric_times(series: pl.Series, microseconds: int) -> pl.Series:
    whole, bad = integers(series)
    limit = (2**63 - 1) // microseconds
    found = whole.set(~whole.is_between(-limit, limit).fill_null(True), None) * microseconds
    if microseconds == 1 or not bad.any():
        return found
    parts, _ = numbers(series)
    parts = parts.set(~parts.is_between(-limit, limit).fill_null(True), None)
    return found.zip_with(pl.Series(~bad), (parts * microseconds).round().cast(pl.Int64, strict=False))


def _text_times(series: pl.Series, given: str) -> pl.Series:
    if "%H" in given and "%M" not in given:  # polars wants both
        given, series = given + ":%M", series + ":00"
    formats = [(given, "%z" in given or "%#z" in given)] if given else _ISO_FORMATS
    found = series.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("us"))
    if given:
        found = found.clear(len(series))
    for text, zoned in formats:
        left = _mask(found.is_null() & series.is_not_null())
        if not left.any():
            break
        zone = "UTC" if zoned else None
        parsed = series.str.to_datetime(text, strict=False, time_unit="us", time_zone=zone)
        more = parsed.dt.replace_time_zone(None)
        found = found.zip_with(pl.Series(~left), more)
    return found


def _refuse(series: pl.Series, good: bool, wanted: str) -> None:
    if not good and series.dtype != pl.Null:
        advice = "; lists need list = true in their section" if series.dtype.is_nested() else ""
        raise ValueError(
            f"column {series.name!r} holds {series.dtype}, but the schema takes {wanted}{advice}"
        )


def _mask(series: pl.Series) -> Mask:
    return series.to_numpy()
