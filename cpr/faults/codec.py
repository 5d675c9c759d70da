"""Conversion of kinds, events and schedules to plain JSON values and back, with checks of all types."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from cpr.faults.kinds import KINDS, Kind

T = TypeVar("T")

_TYPE_NAMES: Final = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def encode(value: Any) -> Any:
    """Plain values of a dataclass of this package, or of the value of a field; None is left out."""
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    plain = {name: encode(item) for name, item in fields.items() if item is not None}
    return {"kind": value.name, **plain} if isinstance(value, Kind) else plain


def decode(cls: type[T], payload: Any, what: str) -> T:
    """A dataclass from plain values.

    Args:
        cls: the dataclass.
        payload: values by field name.
        what: name of the object in messages.

    Raises:
        ValueError: a field is unknown, missing, or not of its type, or the dataclass refuses its value.
    """
    hints = field_types(cls)
    names = ", ".join(hints) or "(none)"
    if not isinstance(payload, Mapping):
        raise ValueError(f"{what} is {payload!r}; it must be an object with the fields {names}")
    if unknown := sorted(set(payload) - set(hints)):
        raise ValueError(f"{what} has no field {unknown[0]!r}; its fields are {names}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in payload:
            raise ValueError(f"{what} lacks the field {field.name!r}")
    return cls(**{name: _convert(value, hints[name], f"{what}.{name}") for name, value in payload.items()})


def decode_kind(payload: Any) -> Kind:
    """A kind from `{"kind": name, ...}`, or from its name alone.

    Raises:
        ValueError: there is no such kind, or its fields are wrong.
    """
    fields = {"kind": payload} if isinstance(payload, str) else payload
    name = fields.get("kind") if isinstance(fields, Mapping) else None
    if name not in KINDS:
        shown = payload if name is None else name
        raise ValueError(f"{shown!r} is no kind of failure; the kinds are {', '.join(KINDS)}")
    return decode(KINDS[name], {key: value for key, value in fields.items() if key != "kind"}, name)


def from_cells(cls: type[Any], cells: Mapping[str, str]) -> dict[str, Any]:
    """Plain values from the cells of a table; cells that are not fields of `cls` stay texts.

    Raises:
        ValueError: a cell is not of its field's type.
    """
    hints = field_types(cls)
    return {name: _parse(cell, hints.get(name, str), name) for name, cell in cells.items()}


def field_types(cls: type[Any]) -> dict[str, Any]:
    """Types of a dataclass's fields by name, without the `None` of optional ones."""
    hints = typing.get_type_hints(cls)
    return {field.name: _without_none(hints[field.name]) for field in dataclasses.fields(cls)}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) is types.UnionType:
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def _convert(value: Any, hint: Any, where: str) -> Any:
    if hint is Kind:
        return decode_kind(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r}; it must be a list")
        item_type = typing.get_args(hint)[0]
        return tuple(_convert(item, item_type, f"{where}[{index}]") for index, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type[Any], hint), value, where)
    scalar = str if typing.get_origin(hint) is typing.Literal else hint
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if scalar in {int, float} and is_whole:
        return scalar(value)  # 60 and 60.0 must give equal plans with equal digests
    if scalar is int or not isinstance(value, scalar):
        raise ValueError(f"{where} is {value!r}; it must be {_TYPE_NAMES[scalar]}")
    return value


def _parse(cell: str, hint: Any, name: str) -> Any:
    if hint is bool and cell.lower() in {"true", "false"}:
        return cell.lower() == "true"
    try:
        return hint(cell) if hint in {int, float} else cell
    except ValueError:
        raise ValueError(f"{name} is {cell!r}; it must be {_TYPE_NAMES[hint]}") from None
