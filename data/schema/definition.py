"""What a schema file says: which columns of a table are label, dense values, ids, time and split.

The dataclasses are the sections of the TOML file, and their JSON form is kept in the manifest of a data set,
so that raw rows can be encoded later exactly as the training data were.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from data.schema.parse import build, build_from_file, without_defaults

VALUE_TYPES: Final = ("string", "integer", "hex")
"""Types of values that become ids; hex are 32-bit numbers in hexadecimal, as Criteo writes them."""
ID_RULES: Final = ("vocabulary", "hash", "raw", "modulo", "mix")
_NEEDS_ROWS: Final = ("hash", "modulo", "mix")
_NEEDS_NUMBERS: Final = ("raw", "modulo")
DEFAULT_MIN_COUNT: Final = 3
DEFAULT_MAX_ROWS: Final = 10_000_000
DEFAULT_PARTS: Final = 7
MOST_DAYS: Final = 10_000
"""Days that a data set may have: each becomes a folder."""
TIME_UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1, "day": 1}
"""Microseconds in a unit of numeric times; `day` numbers are taken as they are."""
MOST_ROWS: Final = 2**31 - 1
"""Rows that a table may have."""
_BAD_NAME: Final = re.compile(r"[./\\\x00-\x1f\x7f]|^__|^$|^\s|\s$")


@dataclass(frozen=True, kw_only=True)
class Label:
    """Section `[label]`: the column to predict."""

    column: str
    """Column of the input; empty: the rows have no labels, and `name` says what it would be called."""
    name: str = ""
    """Column of the data set; empty: the same name."""
    at_least: float | None = None
    """The label is 1 where the column's number is at least this, e.g. 4 for ratings. Without it the column
    holds 0 and 1, or false and true."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Section `[[dense]]`: a number. The steps are fill, clip, log1p, standardize, in this order."""

    column: str
    """Column of the input."""
    name: str = ""
    """Column of the data set; empty: the same name."""
    fill: float = 0.0
    """Number for a missing one (also NaN)."""
    clip_min: float | None = None
    """Smaller numbers become this."""
    clip_max: float | None = None
    """Larger numbers become this."""
    log1p: bool = False
    """Take log(x + 1), of 0 for negative numbers; for counts and prices."""
    standardize: bool = False
    """Subtract the mean and divide by the standard deviation, both over all good rows."""
    mean: float | None = None
    """Mean for `standardize`; computed by `data.convert` if not given."""
    std: float | None = None
    """Standard deviation for `standardize`; computed by `data.convert` if not given."""


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Section `[[sparse]]`: a categorical feature, whose values become ids of table rows."""

    column: str
    """Column of the input."""
    name: str = ""
    """Column of the data set, and name of the feature; empty: the same name."""
    type: str = "string"
    """How values are read: `string`, `integer` (05 and 5.0 are 5) or `hex`."""
    ids: str = "vocabulary"
    """How values become ids. `vocabulary`: a row for each value that occurs often enough; id 0 is missing, 1
    any other value. `hash`: id 0 is missing, others share the remaining rows by their hash. `raw`: the
    integer as it is, -1 if missing, for dynamic tables. `modulo`, `mix`: the rules `modulo` and `hash` of
    `data.prepare`, in which missing values count as 0."""
    rows: int | None = None
    """`hash`, `modulo`, `mix`: rows of the table."""
    min_count: int | None = None
    """`vocabulary`: rarer values share id 1. Default 3."""
    max_rows: int | None = None
    """`vocabulary`: rows of the table at most; the most frequent values stay. Default 10 million."""
    list: bool = False
    """A row holds a list of values: a list column, or a text with `separator`."""
    separator: str = ""
    """Splits texts into lists; implies `list`."""
    weights: str = ""
    """Column with a list of numbers, one for each value."""

    @property
    def is_list(self) -> bool:
        """Whether rows hold lists."""
        return self.list or bool(self.separator)

    @property
    def weights_name(self) -> str:
        """Column of the data set with the weights; empty if there are none."""
        return f"{self.name}_weights" if self.weights else ""


@dataclass(frozen=True, kw_only=True)
class Time:
    """Section `[time]`: the column that orders rows."""

    column: str
    """Column of the input: timestamps, dates, texts, or numbers with a `unit`."""
    unit: str = ""
    """Of numbers: `s`, `ms` or `us` since 1970 (UTC), or `day`: the number of the day itself."""
    format: str = ""
    """Of texts or digits, e.g. `%y%m%d%H`; without it texts are ISO 8601 (2026-01-31 23:59:59)."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Section `[split]`: how rows are split into days, the last of which is the test set by default.

    At most one of `parts`, `test` and `column` is given. With none of them, days are the calendar's (UTC,
    counted from the first one in the data) or those of unit `day`, and 7 equal parts without `[time]`.
    """

    parts: int | None = None
    """Equal parts, in order of time, or of the input without `[time]`."""
    test: float | None = None
    """Share of the rows, the last ones, that become day 1, the test set; the others are day 0."""
    column: str = ""
    """Column whose values say the day."""
    days: Mapping[str, int] = field(default_factory=dict)
    """Day of each value of `column`, e.g. {train = 0, test = 1}."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A whole schema file.

    Raises:
        ValueError: it contradicts itself; the message says what to change.
    """

    label: Label
    dense: tuple[Dense, ...] = ()
    sparse: tuple[Sparse, ...] = ()
    time: Time | None = None
    split: Split = field(default_factory=Split)
    missing: tuple[str, ...] = ("",)
    """Texts that stand for a missing value, in every column."""

    def __post_init__(self) -> None:
        sections: list[Label | Dense | Sparse] = [self.label, *self.dense, *self.sparse]
        for section in sections:
            object.__setattr__(section, "name", section.name or section.column)
        if not self.dense and not self.sparse:
            raise ValueError("the schema has no inputs; add [[dense]] or [[sparse]] sections")
        _check_names(self)
        for dense in self.dense:
            _check_dense(dense)
        for sparse in self.sparse:
            _check_sparse(sparse)
        _check_time(self.time, self.split)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns of the input that the model's inputs come from."""
        sections: list[Dense | Sparse] = [*self.dense, *self.sparse]
        weights = [sparse.weights for sparse in self.sparse if sparse.weights]
        return tuple(dict.fromkeys([*(section.column for section in sections), *weights]))

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the input that are read, each once."""
        label = [self.label.column] if self.has_labels else []
        keys = [self.time.column] if self.time else []
        keys += [self.split.column] if self.split.column else []
        return tuple(dict.fromkeys([*label, *self.inputs, *keys]))

    @property
    def has_labels(self) -> bool:
        """Whether a column of the input holds labels."""
        return bool(self.label.column)

    def without_labels(self) -> "Schema":
        """The same inputs of rows that have no labels yet, all of day 0, in the order of the input."""
        label = Label(column="", name=self.label.name)
        return replace(self, label=label, time=None, split=Split(parts=1))

    @classmethod
    def from_toml(cls, path: Path) -> "Schema":
        """Read a schema file.

        Raises:
            ValueError: it is not there, no TOML, or no valid schema.
        """
        return build_from_file(cls, path)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Schema":
        """Read the JSON form, which is also what a schema file parses to.

        Raises:
            ValueError: a key is unknown, missing or of another type.
        """
        return build(cls, raw, "the schema")

    def to_json(self) -> dict[str, Any]:
        """JSON form; keys at their defaults are left out."""
        return without_defaults(self)


def _output_names(schema: Schema) -> Iterator[str]:
    yield schema.label.name
    for dense in schema.dense:
        yield dense.name
    for sparse in schema.sparse:
        yield sparse.name
        if sparse.weights:
            yield sparse.weights_name


def _check_names(schema: Schema) -> None:
    names = Counter(_output_names(schema))
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"two columns of the data set would be called {name!r}; give one another `name`")
        if _BAD_NAME.search(name) or len(name.encode(errors="replace")) > 200:
            raise ValueError(
                f"{name!r} cannot name a column of the data set (no dots, slashes, control characters, "
                "outer blanks, leading double underscore, or more than 200 bytes); give a `name`"
            )


def _check_dense(dense: Dense) -> None:
    where = f"[[dense]] {dense.name}"
    numbers = [dense.fill, dense.clip_min, dense.clip_max, dense.mean, dense.std]
    if any(value is not None and not abs(value) < float("inf") for value in numbers):
        raise ValueError(f"{where}: numbers are finite; leave out a clip_min or clip_max without effect")
    if dense.clip_min is not None and dense.clip_max is not None and dense.clip_min > dense.clip_max:
        raise ValueError(f"{where}: clip_min is above clip_max; swap them")
    if (dense.mean is None) != (dense.std is None) or (dense.mean is not None and not dense.standardize):
        raise ValueError(f"{where}: mean and std are given together, with standardize = true, or not at all")
    if dense.std is not None and dense.std <= 0:
        raise ValueError(f"{where}: std is above 0, not {dense.std}")


def _check_sparse(sparse: Sparse) -> None:
    where = f"[[sparse]] {sparse.name}"
    if sparse.type not in VALUE_TYPES:
        raise ValueError(f"{where}: type is one of {', '.join(VALUE_TYPES)}, not {sparse.type!r}")
    if sparse.ids not in ID_RULES:
        raise ValueError(f"{where}: ids is one of {', '.join(ID_RULES)}, not {sparse.ids!r}")
    if sparse.ids in _NEEDS_NUMBERS and sparse.type == "string":
        raise ValueError(f'{where}: ids = "{sparse.ids}" takes numbers; add type = "integer", or take hash')
    if sparse.ids == "mix" and sparse.type != "hex":
        raise ValueError(f'{where}: ids = "mix" is for type = "hex"; take hash')
    if (sparse.rows is not None) != (sparse.ids in _NEEDS_ROWS):
        say = "needs rows" if sparse.rows is None else "reads no rows; leave it out"
        raise ValueError(f'{where}: ids = "{sparse.ids}" {say}')
    if sparse.ids != "vocabulary" and (sparse.min_count is not None or sparse.max_rows is not None):
        raise ValueError(f'{where}: min_count and max_rows are for ids = "vocabulary"; leave them out')
    for name, value, least in (
        ("rows", sparse.rows, 1 if sparse.ids != "hash" else 2),
        ("max_rows", sparse.max_rows, 3),
        ("min_count", sparse.min_count, 1),
    ):
        if value is not None and not least <= value <= MOST_ROWS:
            raise ValueError(f"{where}: {name} is between {least} and {MOST_ROWS}, not {value}")
    if sparse.weights and not sparse.is_list:
        raise ValueError(f"{where}: weights belong to lists; add list = true, or a separator")


def _check_time(time: Time | None, split: Split) -> None:
    if time is not None:
        if time.unit and time.format:
            raise ValueError("[time]: give a unit (of numbers) or a format (of texts), not both")
        if time.unit and time.unit not in TIME_UNITS:
            raise ValueError(f"[time]: unit is one of {', '.join(TIME_UNITS)}, not {time.unit!r}")
    ways = [split.parts is not None, split.test is not None, bool(split.column)]
    if sum(ways) > 1:
        raise ValueError("[split]: give one of parts, test and column")
    if split.parts is not None and not 1 <= split.parts <= MOST_DAYS:
        raise ValueError(f"[split]: parts is between 1 and {MOST_DAYS:,}, not {split.parts}")
    if split.test is not None and not 0 < split.test < 1:
        raise ValueError(f"[split]: test is a share between 0 and 1, not {split.test}")
    if bool(split.column) != bool(split.days):
        raise ValueError("[split]: column and days belong together, e.g. days = {train = 0, test = 1}")
    if any(not 0 <= day < MOST_ROWS for day in split.days.values()):
        raise ValueError("[split]: days are numbers from 0 on")
