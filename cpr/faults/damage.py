"""Damage to files: one of the newest save, or resident memory that is wiped."""

import shutil
import stat
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

from cpr.faults.kinds import Damage

_HOWS: Final[tuple[Damage, ...]] = ("flip", "truncate", "remove")


def damage_newest_save(checkpoint: Path, how: Damage, seed: int) -> str:
    """Damage one file of the newest complete save.

    Args:
        checkpoint: a checkpoint directory on a file system.
        how: a bit flipped, cut short, removed, or any of these.
        seed: chooses the file, the place in it, and how if `any`. Empty files are left alone.

    Returns:
        What was done to which file.

    Raises:
        ValueError: there is no complete save.
    """
    saves = sorted(path.parent for path in checkpoint.glob("saves/*/manifest.json"))
    if not saves:
        raise ValueError(f"{checkpoint} has no complete save whose files could be damaged")
    files = sorted(path for path in saves[-1].rglob("*") if path.is_file() and path.stat().st_size)
    random = Random(seed)
    path, how = random.choice(files), random.choice(_HOWS) if how == "any" else how
    name, size = path.relative_to(checkpoint), path.stat().st_size
    if how == "remove":
        path.unlink()
        return f"{name} removed"
    place = random.randrange(size)
    with path.open("r+b") as file:
        if how == "truncate":
            file.truncate(place)
            return f"{name} cut from {size} to {place} bytes"
        bit = random.randrange(8)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
        return f"{name}: bit {bit} of byte {place} flipped"


def check_wipeable(folder: Path) -> None:
    """Refuse folders that certainly belong to more than one run.

    Raises:
        ValueError: it is a mount point such as /dev/shm, a link, or a folder that all users share.
    """
    shared = folder.exists() and folder.stat().st_mode & stat.S_ISVTX
    if folder.is_symlink() or folder.is_mount() or shared:
        raise ValueError(f"{folder} is a link or is shared with others: name a folder of the node's own")


def wipe(folder: Path) -> list[Path]:
    """Remove all that is in a folder, but not the folder.

    Returns:
        What was removed, uppermost paths only.

    Raises:
        ValueError: see `check_wipeable`.
    """
    check_wipeable(folder)
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed


def _remove_tree(folder: Path) -> None:
    """Also while what the folder belonged to is removing it as well."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def folders_inside(folder: Path, files: list[Path]) -> list[Path]:
    """Folders that the files are in, of those below `folder` (itself left out)."""
    folder = folder.resolve()
    return sorted({file.parent for file in files if folder in file.parent.parents})
