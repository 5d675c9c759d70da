"""Nested dataclasses from parsed TOML or JSON and back, with errors that name the section and the key."""

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

Made = TypeVar("Made")

_NAMES: Final = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def build_from_file(made: type[Made], path: Path) -> Made:
    """Build a dataclass from a schema file.

    Raises:
        ValueError: it is not there, no TOML, or no valid schema.
    """
    try:
        return build(made, tomllib.loads(path.read_text(encoding="utf-8")), "the schema")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name the schema file") from error
    except ValueError as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise ValueError(f"{path}: {error}") from error


def build(made: type[Made], raw: object, where: str) -> Made:
    """Build a dataclass.

    Args:
        made: the class.
        raw: a mapping of its fields.
        where: names the mapping in errors.

    Raises:
        ValueError: a key is unknown, missing or of another type.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} is a section with keys, not {raw!r}")
    hints = typing.get_type_hints(made)
    known = {item.name: item for item in fields(made)}  # type: ignore[arg-type]
    unknown = [key for key in raw if key not in known]
    if unknown:
        raise ValueError(f"{where} has no key {unknown[0]!r}; its keys are {', '.join(known)}")
    for name, item in known.items():
        if name not in raw and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{where} lacks the key {name!r}; add it")
    return made(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in raw.items()})


def without_defaults(section: Any) -> dict[str, Any]:
    """What `build` makes an equal dataclass of: its keys, without those at their defaults."""
    made: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value) and not isinstance(value, type):
            value = without_defaults(value)
        elif isinstance(value, tuple):
            value = [without_defaults(entry) if is_dataclass(entry) else entry for entry in value]
        default = list(item.default) if isinstance(item.default, tuple) else item.default
        same_name = item.name == "name" and value == section.column
        if value not in (default, {}, None) and not same_name and not (value == [] and default != [""]):
            made[item.name] = value
    return made


def _value(hint: Any, value: object, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:  # X | None, and TOML has no null
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
        return _value(hint, value, where)
    if is_dataclass(hint):
        return build(typing.cast(type, hint), value, f"[{where.rpartition(': ')[2]}]")
    if origin is tuple:
        return _entries(typing.get_args(hint)[0], value, where)
    if origin is not None:  # a mapping
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is a table such as {{train = 0, test = 1}}, not {value!r}")
        entry = typing.get_args(hint)[1]
        return {str(key): _value(entry, one, f"{where}.{key}") for key, one in value.items()}
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} is {_NAMES[hint]}, not {value!r}")
    return value


def _entries(entry: Any, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is a list, not {value!r}")
    if not is_dataclass(entry):
        return tuple(_value(entry, one, where) for one in value)
    section = f"[[{where.rpartition(': ')[2]}]]"
    made = typing.cast(type, entry)
    return tuple(build(made, one, f"{section} {at + 1}") for at, one in enumerate(value))
