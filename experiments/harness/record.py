"""Stores the result of an experiment as one JSON file, with the circumstances of its measurement.

An experiment adds rows as it measures them. Each row is on disk at once, so that an interrupted experiment
continues where it stopped. The `key` of a row names the measurement. A file belongs to one configuration,
commit, machine and set of versions, and rows measured under others are dropped. The exception are rows of
another commit that are kept on purpose (`Record.keep`): each of these names its commit.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dlrm.launch.files import replace_text

RESULTS: Final = Path(__file__).parents[1] / "results"
QUICK: Final = Path("runs") / "quick"
"""Folder of the results of quick runs, in the current folder."""
CIRCUMSTANCES: Final = ("config", "commit", "versions", "machine", "seeds")
"""Fields that must be equal for rows to belong to one result."""
PACKAGES: Final = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow", "polars")

Row = dict[str, Any]


class Record:
    """The result of one experiment, on disk from the first row on.

    Args:
        name: of the experiment; the result is `RESULTS/NAME.json`.
        config: everything that the figures depend on except the code; another config starts over.
        seeds: the seeds used.
        quick: a small run for tests, which never overwrites a stored result.
        folder: where to write; default `experiments/results`, for quick runs `runs/quick`.
        module: in `experiments`, that makes this result; default the one of this name.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        seeds: Sequence[int],
        quick: bool = False,
        folder: Path | None = None,
        module: str | None = None,
    ) -> None:
        if folder is None:
            folder = QUICK if quick else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self._body: dict[str, Any] = {
            "experiment": name,
            "command": " ".join(["python", "-m", f"experiments.{module or name}", *sys.argv[1:]]),
            "commit": _commit(),
            "versions": versions(),
            "machine": machine(),
            "seeds": list(seeds),
            "config": json.loads(json.dumps(dict(config))),
            "finished": None,
            "figures": {},
            "notes": {},
            "rows": [],
        }
        self._stored: dict[str, Any] = {}
        if self.path.exists():
            self._stored = stored = json.loads(self.path.read_text())
            same = all(stored[name] == self._body[name] for name in CIRCUMSTANCES)
            if same and stored["finished"] is None:
                self._body["rows"] = list(stored["rows"])

    @property
    def rows(self) -> list[Row]:
        """The rows measured so far."""
        return list(self._body["rows"])

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Keep stored rows that were measured at another commit; each row names it (`commit`) from now on.

        Args:
            is_kept: whether to keep a row.

        Raises:
            ValueError: nothing is stored, or circumstances other than the commit differ.
        """
        others = [name for name in CIRCUMSTANCES if name != "commit"]
        differing = [name for name in others if self._stored.get(name) != self._body[name]]
        if differing:
            raise ValueError(
                f"no rows of {self.path} can be kept: it is not there, or of other {', '.join(differing)}; "
                "measure all of them"
            )
        have = {row["key"] for row in self._body["rows"]}
        self._body["rows"] += [
            {"commit": self._stored["commit"], **row}
            for row in self._stored["rows"]
            if is_kept(row) and row["key"] not in have
        ]
        self._body["command"] = self._stored["command"]  # the command that measures the kept rows too

    def keep_all(self) -> None:
        """Keep all stored rows, wherever they were measured, to work out their figures again.

        Raises:
            ValueError: nothing is stored.
        """
        self._body |= {name: self._stored[name] for name in CIRCUMSTANCES if name in self._stored}
        self._body["commit"] = _commit()
        self.keep(lambda _: True)

    def measure(self, key: str, function: Callable[[], Row]) -> Row:
        """Return the stored row named `key`, or measure it now with `function` and store it."""
        for row in self._body["rows"]:
            if row["key"] == key:
                return dict(row)
        row = {"key": key, **function()}
        self._body["rows"].append(row)
        self._write()
        return row

    def finish(self, figures: Mapping[str, float | None], notes: Mapping[str, str] | None = None) -> Path:
        """Store the figures and mark the result as finished.

        A figure that is NaN or infinite is stored as missing, with a note.

        Raises:
            ValueError: a figure is missing (None) without a note of that name that gives the reason.
        """
        notes, figures = dict(notes or {}), dict(figures)
        for name, value in figures.items():
            if value is not None and not math.isfinite(value):
                notes[name] = " ".join(filter(None, [f"it came out as {value}.", notes.get(name)]))
                figures[name] = None
        silent = sorted(name for name, value in figures.items() if value is None and name not in notes)
        if silent:
            raise ValueError(f"figures without a value need a note that says why: {silent}")
        self._body["figures"] = figures
        self._body["notes"] = notes
        self._body["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write()
        return self.path

    def publish(
        self,
        figures: Mapping[str, float | None],
        draw: Callable[[Row, Path], object] | None,
        notes: Mapping[str, str] | None = None,
    ) -> int:
        """Finish the result, draw its pictures and print its figures.

        Args:
            figures: see `finish`.
            draw: takes the stored result and the folder for its pictures; None: it has none.
            notes: see `finish`.

        Returns:
            0, the exit status of the experiment's command.
        """
        path = self.finish(figures, notes)
        if draw is not None:
            draw(json.loads(path.read_text()), path.parent)
        for name, value in figures.items():
            print(f"{name}: {'not measured' if value is None else f'{value:.6g}'}")
        print(f"stored in {path}")
        return 0

    def _write(self) -> None:
        head = json.dumps({**self._body, "rows": []}, indent=1).removesuffix("[]\n}")
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self._body["rows"])
        # A row a line: half the size of indented rows, and a new row is one line of a diff.
        replace_text(self.path, f"{head}[\n{rows}\n ]\n}}\n")


def finished_result(path: Path) -> Row | None:
    """Read a stored result; return None if it is absent or not finished."""
    body: Row = json.loads(path.read_text()) if path.exists() else {"finished": None}
    return body if body["finished"] else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide speed and results."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    model, memory_bytes = platform.processor(), 0
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":")[1].strip() if lines else model
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "system": platform.system(),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    is_changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{git('rev-parse', 'HEAD') or 'unknown'}{'+changes' if is_changed else ''}"
