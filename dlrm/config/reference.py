"""The configuration reference, made from the docstrings of the dataclasses and their fields.

`python -m dlrm.config.reference` writes `dlrm/CONFIG.md`; `dlrm.train --help SECTION` prints one section.
"""

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, get_args

from dlrm.config.schema import Config

CONFIG_MD: Final = Path(__file__).parents[1] / "CONFIG.md"
_TYPE_NAMES: Final[dict[Any, str]] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    tuple[int, ...]: "list of integers",
    tuple[str, ...]: "list of strings",
    Mapping[str, Any]: "section",
}
_HEAD: Final = """\
# Configuration reference

Written by `python -m dlrm.config.reference` from the dataclasses in `dlrm/config/schema.py`,
`dlrm/comm/config.py` and `cpr/mirror/config.py`; edit their docstrings, not this file. A recipe is a TOML
file with these sections. On the command line, `--set SECTION.KEY=VALUE` changes a value, and `--help SECTION`
or `--help SECTION.KEY` prints its description.
"""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One configuration key."""

    name: str
    """Section and key, such as `train.epochs`."""
    kind: str
    default: str
    """As TOML."""
    meaning: str


def sections() -> dict[str, str]:
    """The purpose of each section, by its name."""
    return {each.name: _summary(each.type) for each in fields(Config)}


def keys_of(section: str) -> list[Key]:
    """All keys of a section, in the order of the dataclass."""
    cls: Any = next(each.type for each in fields(Config) if each.name == section)
    docstrings = _field_docstrings(cls)
    return [
        Key(
            name=f"{section}.{each.name}",
            kind=_TYPE_NAMES.get(each.type) or "one of " + ", ".join(get_args(each.type)),
            default=json.dumps({} if each.default is MISSING else each.default),
            meaning=docstrings[each.name],
        )
        for each in fields(cls)
    ]


def describe(name: str) -> str:
    """Describe a section or a key as text.

    Raises:
        ValueError: there is no such section or key; names a similar one.
    """
    known = {key.name: [key] for section in sections() for key in keys_of(section)}
    known |= {section: keys_of(section) for section in sections()}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"sections are {', '.join(sections())}"
        raise ValueError(f"there is no configuration section or key {name!r}; {hint}")
    head = [f"{name}: {sections()[name]}"] if name in sections() else []
    entries = [
        f"{key.name} = {key.default}  ({key.kind})\n"
        + textwrap.indent(textwrap.fill(key.meaning, 90), "    ")
        for key in known[name]
    ]
    return "\n\n".join([*head, *entries])


def as_markdown() -> str:
    """The whole reference."""
    parts = [_HEAD]
    for section, purpose in sections().items():
        rows = [_row(key) for key in keys_of(section)]
        head = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {section}", "", purpose, "", *head, *rows]) + "\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    name, meaning = key.name.partition(".")[2], key.meaning.replace("|", "\\|")
    return f"| `{name}` | {key.kind} | `{key.default}` | {meaning} |"


def _summary(cls: Any) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def _field_docstrings(cls: Any) -> dict[str, str]:
    """The string below each field, which Python itself does not keep."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            found[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


if __name__ == "__main__":
    CONFIG_MD.write_text(as_markdown())
    print(f"wrote {CONFIG_MD}")
