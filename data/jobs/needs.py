"""What every machine that runs tasks of a job must have: the same code and libraries, and the job's files."""

import hashlib
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Final

import data
from data.jobs.location import Location

LIBRARIES: Final = ("numpy", "polars", "pyarrow", "zstandard")
"""They decide the bytes of the output."""


_ADVICE: Final = (
    "with --cluster, raw files and --out lie on a store (s3://BUCKET/FOLDER) or in a folder that all "
    "machines mount under the same path"
)


@dataclass(frozen=True)
class Needs:
    """Needs of the tasks of a job. Picklable."""

    versions: tuple[tuple[str, str], ...]
    """Versions of Python, of this package and of libraries, by their names."""
    files: tuple[tuple[Location, int], ...] = ()
    """Local files with their sizes."""
    token: tuple[Location, bytes] | None = None
    """A file that the job has just made in its local output folder, with its content."""

    def problem(self) -> str | None:
        """What is missing in this process, as the end of a sentence about it; None if nothing is."""
        for (name, wanted), (_, found) in zip(self.versions, versions(), strict=True):
            if found != wanted:
                return f"has {name} {found}, not {wanted} as this machine; install the same versions there"
        for file, num_bytes in self.files:
            if _size(file) != num_bytes:
                return f"cannot read {file}, or another file of that name; {_ADVICE}"
        if self.token is not None and _content(self.token[0]) != self.token[1]:
            return f"does not share the folder {self.token[0].root}; {_ADVICE}"
        return None


@lru_cache(maxsize=1)
def versions() -> tuple[tuple[str, str], ...]:
    """Versions in this process."""
    source = hashlib.sha256()
    folder = Path(data.__path__[0])
    for path in sorted(folder.rglob("*.py")):
        source.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return (
        ("Python", f"{sys.version_info.major}.{sys.version_info.minor}"),
        ("the package `data`, with the digest", source.hexdigest()[:12]),
        *((name, metadata.version(name)) for name in LIBRARIES),
    )


@lru_cache(maxsize=8)
def refuse_once(needs: Needs) -> None:
    """Raise a ValueError if something is missing in this process; looks for it only once."""
    problem = needs.problem()
    if problem is not None:
        raise ValueError(f"a worker of the cluster {problem}")


def _size(file: Location) -> int | None:
    try:
        return file.size()
    except OSError:
        return None


def _content(file: Location) -> bytes | None:
    try:
        return file.read()
    except OSError:
        return None
