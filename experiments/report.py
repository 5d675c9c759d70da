"""The page of all stored results: `python -m experiments.report` writes `experiments/results/README.md`.

It says for each result what was measured and how to measure it again, and marks what is not finished.
"""

import argparse
import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.record import RESULTS

PAGE_NAME: Final = "README.md"
INTRODUCTION: Final = """# Stored results

Made by `python -m experiments.report` from the files beside it. Each result was measured by the command
it names, at the commit it names; the same command measures it again.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.parse_args(arguments)
    path = write_page(RESULTS)
    print(f"written to {path}")
    return 0


def write_page(folder: Path) -> Path:
    """Build the page from all results in `folder`.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    results = [_read(path) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(f"{folder} holds no results; run an experiment first, e.g. experiments.precision")
    sections = [_section(result, folder) for result in results]
    names = {result["experiment"] for result in results}
    others = sorted(path for path in folder.glob("*.png") if path.stem not in names)
    if others:
        sections.append("\n".join(["## More pictures", "", *map(_picture, others)]))
    page = folder / PAGE_NAME
    page.write_text("\n\n".join([INTRODUCTION.strip(), *sections]) + "\n")
    return page


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no result ({error}); delete it and run its experiment again") from error
    return result


def _section(result: Mapping[str, Any], folder: Path) -> str:
    name, machine = result["experiment"], result["machine"]
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    state = result["finished"] or f"**not finished**: {len(result['rows'])} rows so far, no figures yet"
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    circumstances = [
        ("command", f"`{result['command']}`"),
        ("finished", state),
        ("commit", f"`{result['commit']}`"),
        ("machine", f"{machine['processor']}, {machine['cores']} cores, {memory}"),
        ("versions", versions),
        ("seeds", ", ".join(map(str, result["seeds"]))),
    ]
    parts = [f"## {name}", _description(name), _table(("", ""), circumstances)]
    if result["figures"]:
        figures = [(f"`{figure}`", _number(value)) for figure, value in result["figures"].items()]
        parts.append(_table(("figure", "value"), figures))
    parts += [f"- `{noted}`: {note}" for noted, note in result["notes"].items()]
    picture = folder / f"{name}.png"
    if result["finished"] and picture.exists():
        parts.append(_picture(picture))
    return "\n\n".join(filter(None, parts))


def _description(name: str) -> str:
    """What the experiment's own module says about it and its figures."""
    module = Path(__file__).parent / f"{name}.py"
    return ast.get_docstring(ast.parse(module.read_text())) or "" if module.exists() else ""


def _table(header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [header, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _picture(path: Path) -> str:
    return f"![{path.stem}]({path.name})"


if __name__ == "__main__":
    raise SystemExit(main())
