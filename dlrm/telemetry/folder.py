"""The run folder `runs/<date>-<time>-<recipe>/`, and the environment description stored in it."""

import os
import platform
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


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
    packages = {each.name: each.version for each in metadata.distributions()}
    return {
        "command": sys.argv,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "machine": {"name": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
        "torch_build": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
    }
