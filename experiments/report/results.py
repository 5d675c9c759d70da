"""Stored results as the report reads them: what was measured, by which command, under what circumstances.

The pages (`report_markdown`, `report_html`) and the tables of the top-level README (`report_readme`) are
all made from these objects and from nothing else.
"""

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

EXPERIMENTS: Final = Path(__file__).parents[1]
RANGES: Final = ("low", "high", "ci")
"""Endings of figures that say how far another one can be trusted."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure: its value, None if it could not be measured, and how far it can be trusted."""

    value: float | None
    low: float | None = None
    high: float | None = None
    ci: float | None = None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest that it may be, if the result says so."""
        if self.value is not None and self.ci is not None:
            return self.value - self.ci, self.value + self.ci
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return None

    def __str__(self) -> str:
        if self.value is not None and self.ci is not None:
            return f"{number(self.value, 3)} ± {number(self.ci, 2)}"
        if self.low is not None and self.high is not None:
            return f"{number(self.value, 3)} ({number(self.low, 3)} to {number(self.high, 3)})"
        return number(self.value, 3)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One experiment's stored result; `experiments.harness.record` describes the fields of the file.

    `description` is what the experiment's own module says of it; `pictures` are those that belong to it,
    none while it is unfinished, since they would show an earlier result.
    """

    name: str
    command: str
    commit: str
    finished: str | None
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    seeds: Sequence[int]
    config: Mapping[str, Any]
    figures: Mapping[str, float | None]
    notes: Mapping[str, str]
    num_rows: int
    description: str
    pictures: Sequence[Path]

    def measured(self, figure: str) -> Measured:
        """The figure with its range.

        Raises:
            ValueError: this result has no such figure.
        """
        if figure not in self.figures:
            raise ValueError(
                f"the stored result of {self.name} has no figure {figure!r}; it has {sorted(self.figures)}. "
                f"Measure again with `{self.command}`, or correct the name where it is used"
            )
        ranges = {ending: self.figures.get(f"{figure}_{ending}") for ending in RANGES}
        return Measured(value=self.figures[figure], **ranges)

    def main_figures(self) -> dict[str, Measured]:
        """All figures but those that only give another one's range."""
        ranges = {f"{figure}_{ending}" for figure in self.figures for ending in RANGES}
        return {figure: self.measured(figure) for figure in self.figures if figure not in ranges}

    def circumstances(self) -> list[tuple[str, str]]:
        """Label and text of everything besides code and figures that a reader may want to check."""
        machine, memory = self.machine, f"{self.machine['memory_bytes'] / 1e9:.0f} GB"
        return [
            ("commit", self.commit),
            ("machine", f"{machine['processor']}, {machine['cores']} cores, {memory}"),
            ("versions", ", ".join(f"{package} {version}" for package, version in self.versions.items())),
            ("seeds", ", ".join(map(str, self.seeds))),
        ]


def read_results(folder: Path) -> dict[str, Result]:
    """All results in `folder`, by name, in alphabetical order.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    bodies = {path: _read(path) for path in sorted(folder.glob("*.json"))}
    if not bodies:
        raise ValueError(f"{folder} holds no results; run an experiment first, e.g. experiments.precision")
    pictures = pictures_by_name(folder, [path.stem for path in bodies])
    return {path.stem: _result(path, body, pictures[path.stem]) for path, body in bodies.items()}


def finished_only(results: Mapping[str, Result]) -> dict[str, Result]:
    """Those whose figures are final."""
    return {name: result for name, result in results.items() if result.finished}


def pictures_by_name(folder: Path, names: Iterable[str]) -> dict[str, list[Path]]:
    """The pictures of each result, `NAME.png` and `NAME_*.png`; those of none are under the empty name.

    The longest name wins: `recovery_soak.png` belongs to `recovery_soak`, if there is one, not to `recovery`.
    """
    found: dict[str, list[Path]] = {name: [] for name in ["", *names]}
    for picture in sorted(folder.glob("*.png")):
        owners = [name for name in found if name and f"{picture.stem}_".startswith(f"{name}_")]
        found[max(owners, key=len, default="")].append(picture)
    return found


def number(value: float | None, digits: int = 4) -> str:
    """For reading: thousands in groups, and `digits` significant digits, or all before the point."""
    if value is None:
        return "not measured"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or "e+" in text else text


def _read(path: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no result ({error}); delete it and run its experiment again") from error
    return body


def _result(path: Path, body: Mapping[str, Any], pictures: Sequence[Path]) -> Result:
    try:
        return Result(
            name=body["experiment"],
            command=body["command"],
            commit=body["commit"],
            finished=body["finished"],
            versions=body["versions"],
            machine=body["machine"],
            seeds=body["seeds"],
            config=body["config"],
            figures=body["figures"],
            notes=body["notes"],
            num_rows=len(body["rows"]),
            description=_description(path.stem),
            pictures=pictures if body["finished"] else [],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result ({error!r} is missing or wrong); move it elsewhere") from error


def _description(name: str) -> str:
    modules = EXPERIMENTS / f"{name}.py", EXPERIMENTS / name / "run.py"
    texts = [ast.get_docstring(ast.parse(module.read_text())) for module in modules if module.exists()]
    return texts[0] or "" if texts else ""
