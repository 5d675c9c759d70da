"""Stored results as the report reads them: figures, and the command, commit and machine behind them.

The READMEs' tables (`readme`) and the HTML page (`html`) are made from these objects and from nothing else.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

EXPERIMENTS: Final = Path(__file__).parents[1]
RANGES: Final = ("low", "high", "ci")
"""Endings of figures that say how far another one can be trusted."""
EARLIER_COMMITS: Final = (
    "008c159 11f9b69 171db8c 3f92461 449d943 6e3ad1d 73fbe69 83f6ccd 8eaeab5 918f27d a41b15f aeeb135 "
    "bd18d0f cc1d176 d2d2644 e099d46 f13f08e fa427b1"
)
"""Commits of stored results that were measured before all modules moved to their present folders."""
EARLIER_LAYOUT, UNCOMMITTED, ROWS_BEFORE = "†", "‡", "§"
MARKS: Final = {
    EARLIER_LAYOUT: "measured at that commit of an earlier layout of the folders",
    UNCOMMITTED: "with changes that were not committed",
    ROWS_BEFORE: "figures worked out at that commit from rows that were measured at an earlier one",
}
"""What a reader has to know of a result's code, by the mark that stands next to its commit."""


@dataclass(frozen=True, kw_only=True)
class FigureValue:
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

    def __format__(self, spec: str) -> str:
        """For the texts in `tables.toml`, whose first lines describe the formats."""
        if spec == "ratio":
            return f"**{self:.2f} x** ({self._limit(self.low):.2f} to {self._limit(self.high):.2f})"
        if spec == "delta":
            return f"**{self:+.1f/1e-4} ± {self._limit(self.ci):.1f/1e-4}**"
        if not spec:
            return str(self)
        if self.value is None:
            return "not measured"
        spec, _, divisor = spec.partition("/")
        value = self.value / float(divisor or 1)
        text = format(value, spec)
        if value and not re.search("[1-9]", text):  # rounded to "+0.0000", it would pass for exactly none
            text = format(value, ("+" if "+" in spec else "") + (".2%" if "%" in spec else ".1g"))
        return text.replace("%", " %")

    @staticmethod
    def _limit(value: float | None) -> "FigureValue":
        if value is None:
            raise ValueError("the figure has no range")
        return FigureValue(value=value)


@dataclass(frozen=True)
class Result:
    """One experiment's stored result.

    Attributes:
        name: of the experiment.
        body: the file; `experiments.harness.record` describes its fields.
        pictures: those that belong to it, none while it is unfinished, since they would show an earlier
            result.
    """

    name: str
    body: Mapping[str, Any]
    pictures: Sequence[Path]

    @property
    def figures(self) -> Mapping[str, float | None]:
        """All figures by name; None where one could not be measured."""
        figures: Mapping[str, float | None] = self.body["figures"]
        return figures

    @property
    def command(self) -> str:
        """The command line that measured the result."""
        return str(self.body["command"])

    @property
    def is_finished(self) -> bool:
        """Whether all rows are measured, so that there are figures."""
        return bool(self.body["finished"])

    def measured(self, figure: str) -> FigureValue:
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
        return FigureValue(value=self.figures[figure], **ranges)

    def main_figures(self) -> dict[str, FigureValue]:
        """All figures but those that only give another one's range."""
        ranges = {f"{figure}_{ending}" for figure in self.figures for ending in RANGES}
        return {figure: self.measured(figure) for figure in self.figures if figure not in ranges}

    @property
    def module(self) -> Path | None:
        """The module that measured it, describes it and draws its pictures; None if there is none left."""
        named = re.search(r"-m experiments\.(\w+)", self.command)
        name = named[1] if named else self.name
        found = EXPERIMENTS / f"{name}.py", EXPERIMENTS / name / "run.py"
        return next((path for path in found if path.exists()), None)

    @property
    def description(self) -> str:
        """The docstring of the experiment's own module; empty if there is none."""
        return (self.module and ast.get_docstring(ast.parse(self.module.read_text()))) or ""

    @property
    def provenance(self) -> str:
        """The command and the short commit, with the `MARKS` that apply."""
        commit, _, changes = str(self.body["commit"]).partition("+")
        marks = EARLIER_LAYOUT if commit[:7] in EARLIER_COMMITS else ""
        marks += UNCOMMITTED if changes else ""
        marks += ROWS_BEFORE if any(row.get("commit", commit) != commit for row in self.body["rows"]) else ""
        return f"`{self.command}` at `{commit[:7]}`{marks}"

    def circumstances(self) -> list[tuple[str, str]]:
        """Label and text of everything besides code and figures that a reader may want to check."""
        machine, memory = self.body["machine"], f"{self.body['machine']['memory_bytes'] / 1e9:.0f} GB"
        versions = ", ".join(f"{package} {version}" for package, version in self.body["versions"].items())
        return [
            ("commit", str(self.body["commit"])),
            ("machine", f"{machine['processor']}, {machine['cores']} cores, {memory}"),
            ("versions", versions),
            ("seeds", ", ".join(map(str, self.body["seeds"]))),
        ]


def read_results(folder: Path) -> dict[str, Result]:
    """All results in `folder`, by name, in alphabetical order.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    bodies = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    if not bodies:
        raise ValueError(f"{folder} holds no results; run an experiment first, e.g. experiments.precision")
    pictures = pictures_by_name(folder, bodies)
    return {
        name: Result(name, body, pictures[name] if body["finished"] else []) for name, body in bodies.items()
    }


def finished_only(results: Mapping[str, Result]) -> dict[str, Result]:
    """Keep only the results of finished experiments, whose figures are final."""
    return {name: result for name, result in results.items() if result.is_finished}


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
        missing = {"command", "commit", "finished", "figures", "rows"} - body.keys()
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path} is no result ({error}); delete it and run its experiment again") from error
    if missing:
        raise ValueError(f"{path} is no result (it lacks {sorted(missing)}); move it elsewhere")
    return body
