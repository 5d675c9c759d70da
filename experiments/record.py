"""How an experiment stores what it found: one JSON file a name, complete with its circumstances.

An experiment adds rows as it measures them; each is on disk at once, so an interrupted experiment
goes on where it stopped. Rows carry a `key` that says which measurement they are. A file belongs to
one configuration, commit, machine and set of versions: rows measured under others are not mixed in.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
QUICK: Final = Path("runs") / "quick"
"""Where quick runs leave their results, under the current folder."""
CIRCUMSTANCES: Final = ("config", "commit", "versions", "machine", "seeds")
"""What must be equal for rows to belong to one result."""
PACKAGES: Final = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow", "polars")

Row = dict[str, Any]


class Record:
    """The result of one experiment, kept on disk while it is being made.

    Args:
        name: the experiment; the result is `RESULTS/NAME.json`.
        config: everything that the figures depend on besides the code; another config starts over.
        seeds: the seeds used.
        quick: a small run for tests, which never overwrites a stored result.
        folder: where to write; default `experiments/results`, for quick runs `runs/quick`.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        seeds: Sequence[int],
        quick: bool = False,
        folder: Path | None = None,
    ) -> None:
        if folder is None:
            folder = QUICK if quick else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self._body: dict[str, Any] = {
            "experiment": name,
            "command": " ".join(["python", "-m", f"experiments.{name}", *sys.argv[1:]]),
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
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            same = all(stored[name] == self._body[name] for name in CIRCUMSTANCES)
            if same and stored["finished"] is None:
                self._body["rows"] = stored["rows"]

    @property
    def rows(self) -> list[Row]:
        """The rows measured so far."""
        return list(self._body["rows"])

    def measure(self, key: str, function: Callable[[], Row]) -> Row:
        """The stored row named `key`, or the one that `function` measures now."""
        for row in self._body["rows"]:
            if row["key"] == key:
                return dict(row)
        row = {"key": key, **function()}
        self._body["rows"].append(row)
        self._write()
        return row

    def finish(self, figures: Mapping[str, float | None], notes: Mapping[str, str] | None = None) -> Path:
        """Store the figures and mark the result as finished.

        Raises:
            ValueError: a figure is missing (None) and no note of that name says why.
        """
        notes = dict(notes or {})
        silent = sorted(name for name, value in figures.items() if value is None and name not in notes)
        if silent:
            raise ValueError(f"figures without a value need a note that says why: {silent}")
        self._body["figures"] = dict(figures)
        self._body["notes"] = notes
        self._body["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write()
        return self.path

    def _write(self) -> None:
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(self._body, indent=1) + "\n")
        temporary.replace(self.path)


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
    here = Path(__file__).parent
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return f"{head or 'unknown'}{'+changes' if dirty else ''}"
