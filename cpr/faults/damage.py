"""Damage to a file of the newest save, and wiping of resident memory."""

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
        how: see `DamageFile.how`.
        seed: chooses the non-empty file, the place in it, and the damage if `any`.

    Returns:
        A description of the damage.

    Raises:
        ValueError: there is no complete save.
    """
    # a save is complete once it has a manifest, and names sort by age
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
    """Refuse folders that belong to more than one run.

    Raises:
        ValueError: the folder is a mount point such as /dev/shm, a link, or shared by all users.
    """
    shared = folder.exists() and folder.stat().st_mode & stat.S_ISVTX
    if folder.is_symlink() or folder.is_mount() or shared:
        raise ValueError(f"{folder} is a link or is shared with others: name a folder of the node's own")


def wipe(folder: Path) -> list[Path]:
    """Remove the contents of a folder, but not the folder.

    Returns:
        The removed paths directly inside the folder.

    Raises:
        ValueError: see `check_wipeable`.
    """
    check_wipeable(folder)
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            while path.exists():  # again while its owner is removing it as well
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed


def folders_inside(folder: Path, files: list[Path]) -> list[Path]:
    """The folders of the files that are below `folder`, without `folder` itself."""
    folder = folder.resolve()
    return sorted({file.parent for file in files if folder in file.parent.parents})
