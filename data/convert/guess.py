"""Writes a schema to start from, by the names and values of a file's first rows."""

import re
from typing import Final

import polars as pl

from data.convert.read.files import LOOK_BYTES, InputFile, columns_of, format_of
from data.jobs.location import Location
from data.schema import values
from data.schema.definition import Time

_LABELS: Final = ("label", "click", "clicked", "is_click", "target", "y", "conversion")
_RATINGS: Final = ("rating", "stars", "score")
_TIMES: Final = ("timestamp", "time", "datetime", "date", "ts", "created_at", "event_time", "day", "hour")
_SEPARATORS: Final = ("|", ";")
_SPLIT_SHARE: Final = 0.2
"""Share of texts with a separator from which a column counts as one of lists."""
_FEW_VALUES: Final = 20
_MANY_VALUES: Final = 0.5
_HEAD: Final = """# A schema for `python -m data.convert`, guessed from the first rows of {path}.
# Correct what is wrong. Columns without a section are left out of the data set.
# All keys: data/convert/README.md.

missing = ["", "NA", "NULL"]  # texts that stand for a missing value
"""


def guess(path: Location) -> str:
    """Text of a schema file for a table.

    Raises:
        ValueError: the file is missing or of no known format, or has no columns.
    """
    if path.size() is None:
        raise ValueError(f"{path} is not a file; name one file of the table")
    frame = _first_rows(path)
    left = {name: values.known(frame[name], ("", "NA", "NULL")) for name in frame.columns}
    words = {name: re.sub(r"[\s-]+", "_", name.lower()) for name in left}
    time = next((name for name in left if words[name] in _TIMES or left[name].dtype.is_temporal()), None)
    others = [name for name in left if name != time] or list(left)
    named = [name for name in others if words[name] in (*_LABELS, *_RATINGS)]
    found = [*named, *(name for name in others if _is_flag(left[name]))]
    label = [*found, *others][0]
    doubt = "" if found else "# No column looks like the label: name it here.\n"
    sections = [_HEAD.format(path=path.name), doubt + _label(label, left.pop(label))]
    if time in left:
        sections.append(_time(time, left.pop(time)))
    sections += [_feature(name, column) for name, column in left.items()]
    return "\n".join(sections)


def _first_rows(path: Location) -> pl.DataFrame:
    kind = format_of(path)
    names, lists = columns_of(path, kind)
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has two columns of one name; rename one of them")
    file = InputFile(path=path, name=path.name, format=kind, num_bytes=0, head_sha256="", lists=tuple(lists))
    for block in file.blocks(names, 0, LOOK_BYTES):
        return block.frame
    raise ValueError(f"{path} has no rows")


def _label(name: str, column: pl.Series) -> str:
    title = "[label]  # what the model predicts: 0/1 or false/true, or a number with a threshold"
    text = f"{title}\n{_column(name)}"
    return text if _is_flag(column) else text + "at_least = 4  # 1 from here on, 0 below\n"


def _time(name: str, column: pl.Series) -> str:
    lines = ["[time]  # orders the rows; calendar days (UTC) become the days of the data set", _column(name)]
    found, bad = (None, None) if column.dtype.is_temporal() else _as(values.integers, column)
    if found is not None and bad is not None and not bad.any() and found.count():
        largest = int(found.max())  # type: ignore[arg-type]
        unit = next(unit for limit, unit in _UNITS if largest < limit)
        lines.append(f'unit = "{unit}"  # s, ms, us, or day (its number); of digits give a format instead\n')
    elif column.dtype == pl.String and values.times(column, Time(column=name))[1].all():
        lines.append('format = "%d/%m/%Y %H:%M"  # not ISO 8601: say how the texts are written\n')
    lines.append("\n# [split]  # instead of calendar days\n# parts = 10  # equal parts, in order of time\n")
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


_UNITS: Final = ((10**6, "day"), (10**11, "s"), (10**14, "ms"), (float("inf"), "us"))


def _feature(name: str, column: pl.Series) -> str:
    if column.dtype.is_nested():
        return f"[[sparse]]\n{_column(name)}list = true\n"
    distinct, present = column.n_unique(), max(column.count(), 1)
    found, bad = _as(values.numbers, column)
    is_code = column.dtype == pl.String and column.str.contains(r"^0\d").any()  # 00034 is no number
    is_code = is_code or name.lower().endswith("id")
    if found is not None and bad is not None and not bad.any() and not is_code:
        whole = (found.drop_nulls() % 1 == 0).all()
        if distinct > _FEW_VALUES or not whole:
            counts = "log1p = true\n" if whole and not (found < 0).any() else "standardize = true\n"
            return f"[[dense]]\n{_column(name)}{counts}"
    if column.dtype == pl.String:
        for separator in _SEPARATORS:
            if column.str.contains(separator, literal=True).sum() > _SPLIT_SHARE * present:
                return f'[[sparse]]\n{_column(name)}separator = "{separator}"\n'
    note = "  # hardly a value occurs twice: an id of the row? then remove this section"
    rare = distinct > _MANY_VALUES * present and present > _FEW_VALUES
    kind = 'type = "integer"\n' if column.dtype.is_float() else ""
    return f"[[sparse]]{note if rare else ''}\n{_column(name)}{kind}"


def _as(reader: values.Reader, column: pl.Series) -> tuple[pl.Series | None, values.Mask | None]:
    try:
        return reader(column)
    except ValueError:
        return None, None


def _is_flag(column: pl.Series) -> bool:
    try:
        return bool(column.count()) and not values.labels(column.drop_nulls(), None)[1].any()
    except ValueError:
        return False


def _column(name: str) -> str:
    text = f"column = {_quoted(name)}\n"
    fit = re.sub(r"[./\\\x00-\x1f\x7f]|^\s+|\s+$|^__", "_", name)
    fit = re.sub(r"^_{2,}", "_", fit) or "unnamed"
    return text if fit == name else text + f"name = {_quoted(fit)}\n"


def _quoted(text: str) -> str:
    """A basic string of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'
