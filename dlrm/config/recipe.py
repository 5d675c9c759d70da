"""Reads a configuration from a recipe and `--set SECTION.KEY=VALUE`, checking names and types.

A recipe is a TOML file with one section for each dataclass of `dlrm.config.schema`, either
`dlrm/recipes/NAME.toml` or any path.
"""

import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from dlrm.config.schema import BEST, Config

RECIPES: Final = Path(__file__).parents[1] / "recipes"
_BEYOND_FLOAT: Final = 2**1023
"""Larger integers become infinity, which `check_fields` refuses by name; float() would overflow."""


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_config(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply overrides.

    Args:
        recipe: a name of `recipe_names()` or the path of a TOML file.
        overrides: `section.key=value` with TOML values (`64`, `true`, `[512, 256, 1]`); other text is a
            string.

    Raises:
        ValueError: unknown recipe, section or key, a value of the wrong type or an impossible combination.
    """
    return _configure(_read(recipe), overrides)


def _configure(raw: dict[str, Any], overrides: Sequence[str]) -> Config:
    for override in overrides:
        name, separator, value = override.partition("=")
        section, _, key = name.strip().partition(".")
        inner, _, rest = key.partition(".")
        path = [section, inner, *rest.split(".")] if rest and _is_open(section, inner) else [section, key]
        if not separator or not all(path):
            raise ValueError(f"--set wants section.key=value, not {override!r}")
        _assign(raw, path, _parse_value(value.strip()))
    config: Config = _build(Config, raw, where="")
    return config


def _is_open(section: str, key: str) -> bool:
    """Whether a key is a section of its own with any names, as `model.options` is."""
    hints = typing.get_type_hints(typing.get_type_hints(Config).get(section, object))
    return typing.get_origin(hints.get(key)) is Mapping


def _assign(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set an entry of nested sections, making those that are missing."""
    for depth, name in enumerate(path[:-1], start=1):
        inner: Any = values.setdefault(name, {})
        if not isinstance(inner, dict):
            where = ".".join(path[:depth])
            raise ValueError(f"{where} must be a section of key = value lines, not {inner!r}")
        values = inner
    values[path[-1]] = value


def load_resumed(folder: Path, overrides: Sequence[str] = ()) -> tuple[str, Config]:
    """Read the recipe's name and the configuration from a run folder that every rank can read.

    Raises:
        ValueError: `folder` is no run folder, or as in `load_config`.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        recipe = raw.pop("recipe")
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} is not the folder of a run: there is no {path}. Name one that dlrm.train has made, "
            "such as runs/20261121-151353-tiny"
        ) from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); start again with --recipe") from error
    return recipe, _configure(raw, overrides)


def load_warm_started(folder: Path, overrides: Sequence[str] = ()) -> tuple[str, Config]:
    """Configure a new run like the one in `folder`, starting from its model and saving to a place of its own.

    The model is that of the newest save; if `folder` is the folder `best` of a run, that of the best one.

    Raises:
        ValueError: as in `load_resumed`.
    """
    from_best = folder.name == BEST and not (folder / "config.json").exists()
    folder = folder.parent if from_best else folder
    saves = load_resumed(folder)[1].checkpoint
    directory = saves.best_directory if from_best else saves.directory
    source = json.dumps(directory(folder.absolute()))
    return load_resumed(folder, ["checkpoint.uri=", f"train.warm_start={source}", *overrides])


def _read(recipe: str) -> dict[str, Any]:
    path = Path(recipe) if recipe.endswith(".toml") else RECIPES / f"{recipe}.toml"
    if not path.is_file():
        raise ValueError(
            f"there is no recipe {recipe!r}; choose {', '.join(recipe_names())}, or give a .toml file"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(cls: type[Any], raw: Any, where: str) -> Any:
    """Make the dataclass `cls` from a TOML table; `where` is its name and a dot, for messages."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where.rstrip('.')} must be a section of key = value lines, not {raw!r}")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{where}{key}"
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {where}{close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown configuration key {name}; {hint}")
        wanted = hints[key]
        nested = is_dataclass(wanted)
        values[key] = _build(wanted, value, f"{name}.") if nested else _convert(value, wanted)
    return cls(**values)


def _convert(value: Any, wanted: Any) -> Any:
    """Convert what TOML writes differently: lists become tuples, and integers become floats where wanted."""
    if isinstance(wanted, types.GenericAlias) and isinstance(value, list):  # tuple[X, ...]
        return tuple(_convert(entry, typing.get_args(wanted)[0]) for entry in value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < _BEYOND_FLOAT else math.inf
    return value
