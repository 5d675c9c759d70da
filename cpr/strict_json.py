"""Strict JSON for files that may be damaged or forged: any fault is a `ValueError` with the path to it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

LARGEST_INT: Final = 2**63 - 1
"""Larger integers would overflow tensors, file offsets and NumPy."""

T = TypeVar("T")
Reader = Callable[[Any], Any]


class _FaultError(ValueError):
    """A value that does not fit its annotation."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, ""

    def __str__(self) -> str:
        return f"{self.path.lstrip('.')} {self.what}".lstrip()


def parse(text: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: `text` is not JSON, has a key twice in an object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def build(kind: Callable[..., T], value: Any) -> T:
    """Build a dataclass from parsed JSON, checking each field against its annotation.

    Annotations may be made of dataclasses, `Mapping[str, ...]`, `Sequence[...]` (built as a tuple),
    `tuple[...]`, `Literal`, `| None`, `str`, `bool`, `int` (0 to 2**63 - 1), `float` (finite,
    not below 0) and `int | float` (finite, either sign). Fields without a default are required; unknown keys
    are refused, except in a dataclass whose class variable `ignores_unknown` is true.

    Raises:
        ValueError: a value has another type or is out of range; the message begins with the path to it.
    """
    built: T = _reader(kind)(value)
    return built


def register(kind: type[T], reader: Callable[[Any], T]) -> None:
    """Let `build` read values annotated with `kind` by `reader`, such as one that chooses a subclass."""
    _PLAIN[kind] = reader


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {next(key for key in keys if keys.count(key) > 1)!r} twice in one object")
    return found


@cache
def _reader(kind: Any) -> Reader:
    """The function that checks a value and converts it to `kind`."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return _fields_reader(kind)
    return _BY_ORIGIN[get_origin(kind)](*get_args(kind))


def _fields_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    is_lenient = getattr(kind, "ignores_unknown", False)
    required = {
        each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING
    }
    readers = {each.name: (_reader(hints[each.name]), f".{each.name}") for each in fields(kind)}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _FaultError(f"is {_shown(value)}, not an object")
        if (unknown := value.keys() - readers.keys()) and not is_lenient:
            known = ", ".join(readers) or "(none)"
            raise _FaultError(f"has {min(unknown)!r}, which this program does not know; it knows {known}")
        if lacking := required - value.keys():
            raise _FaultError(f"lacks {min(lacking)!r}")
        found = {}
        for name in value.keys() & readers.keys() if is_lenient else value:
            reader, where = readers[name]
            found[name] = _inside(reader, value[name], where)
        return kind(**found)

    return read


def _choice_reader(*choices: Any) -> Reader:
    def read(value: Any) -> Any:
        if value not in choices:
            raise _FaultError(f"is {_shown(value)}, not one of {', '.join(map(repr, choices))}")
        return value

    return read


def _union_reader(*kinds: Any) -> Reader:
    others = [each for each in kinds if each is not NoneType]
    other = _number if set(others) == {int, float} else _reader(*others)
    return other if NoneType not in kinds else lambda value: None if value is None else other(value)


def _tuple_reader(*kinds: Any) -> Reader:
    if kinds[-1] is Ellipsis:
        return _sequence_reader(kinds[0])
    readers = [_reader(each) for each in kinds]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _FaultError(f"is {_shown(value)}, not a list of {len(readers)}")
        pairs = zip(readers, value, strict=True)
        return tuple(_inside(reader, each, f"[{at}]") for at, (reader, each) in enumerate(pairs))

    return read


def _sequence_reader(kind: Any) -> Reader:
    reader = _reader(kind)

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise _FaultError(f"is {_shown(value)}, not a list")
        return tuple(_inside(reader, each, f"[{at}]") for at, each in enumerate(value))

    return read


def _mapping_reader(_: Any, kind: Any) -> Reader:
    reader = _reader(kind)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _FaultError(f"is {_shown(value)}, not an object")
        return {_text(name): _inside(reader, each, f"[{name!r}]") for name, each in value.items()}

    return read


def _inside(reader: Reader, value: Any, where: str) -> Any:
    try:
        return reader(value)
    except _FaultError as fault:
        fault.path = where + fault.path
        raise


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise _FaultError(f"is {_shown(value)}, neither true nor false")
    return value


def _whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_INT:
        raise _FaultError(f"is {_shown(value)}, not a whole number from 0 on")
    return value


def _number(value: Any) -> int | float:
    if type(value) is int and abs(value) <= LARGEST_INT:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise _FaultError(f"is {_shown(value)}, not a finite number")


def _measure(value: Any) -> float:
    number = _number(value)
    if number < 0:
        raise _FaultError(f"is {_shown(value)}, which is below 0")
    return float(number)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _FaultError(f"is {_shown(value)}, not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # lone surrogates can be in no file name and no log
            raise _FaultError(f"is {_shown(value)}, which is no Unicode text") from error
    return value


def _shown(value: Any) -> str:
    """A short text for a value in a message."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if type(value) is int and abs(value) > LARGEST_INT:
        return "a number beyond 64 bits"
    return repr(value)[:60]


_PLAIN: Final[dict[Any, Reader]] = {bool: _truth, int: _whole_number, float: _measure, str: _text}
_BY_ORIGIN: Final[Mapping[Any, Callable[..., Reader]]] = {
    Literal: _choice_reader,
    UnionType: _union_reader,
    tuple: _tuple_reader,
    Sequence: _sequence_reader,
    Mapping: _mapping_reader,
}
