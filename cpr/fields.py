"""Type checks of configuration fields against their annotations; without torch."""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Final

_NAMES: Final = {int: "a whole number", float: "a number", bool: "true or false", str: 'a "text"'}


def check_fields(config: Any, where: str = "") -> None:
    """Refuse values of types other than declared, and numbers that are infinite, NaN or too large.

    Args:
        config: a dataclass; its `__post_init__` calls this before its own checks.
        where: prefix of field names in messages, such as `train.`.

    Raises:
        ValueError: a value is wrong; the message names the field and its type.
    """
    hints = typing.get_type_hints(type(config))
    for field in fields(config):
        _check(f"{where}{field.name}", getattr(config, field.name), hints[field.name])


def _check(name: str, value: Any, wanted: Any) -> None:
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is tuple:  # tuple[X, ...]
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a list, e.g. {name}=[...], not {value!r}")
        for index, entry in enumerate(value):
            _check(f"{name}[{index}]", entry, inner[0])
    elif origin in {typing.Union, types.UnionType}:
        if value is None and types.NoneType in inner:
            return
        rest = [each for each in inner if each is not types.NoneType]
        _check(name, value, next((each for each in rest if _is_a(value, each)), rest[0]))
    elif origin is typing.Literal:
        if value not in inner:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, inner))}")
    elif origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a section of key = value lines, not {value!r}")
    elif not _is_a(value, wanted):
        raise ValueError(f"{name} must be {_NAMES.get(wanted, f'a {wanted.__name__}')}, not {value!r}")
    elif wanted is float and not _is_finite(value):
        raise ValueError(f"{name} must be finite, not {value!r}")
    elif wanted is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, and {value!r} does not")


def _is_a(value: Any, wanted: Any) -> bool:
    if wanted in {int, float}:
        return isinstance(value, Integral if wanted is int else Real) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
