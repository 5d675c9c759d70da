"""The run folder `runs/<date>-<time>-<recipe>/`, and what it keeps of the run's environment and data."""

import os
import platform
import re
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from data.dataset import DatasetManifest

DATA_NAME: Final = "data.json"
"""The manifest of the data that the run is trained on, without its files."""


def make_run_folder(root: Path, recipe: str, now: datetime) -> Path:
    """Make a new folder in `root`, named after local time and recipe; called on one rank.

    Raises:
        ValueError: the folder cannot be made.
    """
    name = f"{now:%Y%m%d-%H%M%S}-{Path(recipe).stem}"
    attempt = 1
    while True:
        folder = root / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            if not root.is_dir():
                raise ValueError(f"{root} is a file; runs need a folder") from error
            attempt += 1
        except OSError as error:
            raise ValueError(
                f"the run folder {folder} cannot be made ({error}); choose another place"
            ) from error
        else:
            return folder


def circumstances() -> dict[str, Any]:
    """Command, machine, Python and installed packages of this process, for `versions.json`."""
    return {
        "command": sys.argv,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "machine": {"name": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
        "torch_build": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": _packages(),
    }


def trained_manifest(folder: Path) -> DatasetManifest | None:
    """Manifest, without files, of the data that a run was trained on; None for a run that has not kept it.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / DATA_NAME
    try:
        return DatasetManifest.from_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged; restore it, or remove it ({error})") from error


def _packages() -> dict[str, str]:
    """Versions of installed packages by name; `metadata` would parse each one's whole README, twice."""
    versions = {}
    for each in metadata.distributions():
        text = each.read_text("METADATA") or each.read_text("PKG-INFO") or ""
        fields = dict(re.findall(r"^(Name|Version): *(.+)$", text.partition("\n\n")[0], re.MULTILINE))
        if len(fields) == 2:
            versions[fields["Name"]] = fields["Version"]
    return dict(sorted(versions.items()))
