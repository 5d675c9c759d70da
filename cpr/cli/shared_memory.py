"""`cpr clean` and `cpr rescue`: free or save the shared memory that dead runs left on this machine."""

import argparse
from pathlib import Path
from typing import Final

from cpr.cli.command import FINE, Command, byte_bar
from cpr.humanize import count_text, size_text
from cpr.resident.cleanup import free, occupied
from cpr.resident.folders import UNSAVED_FILE, unsaved_segments, user_folder


def _add_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="remove what no run needs (default: only list)")
    parser.add_argument(
        "--unsaved", action="store_true", help="with --yes: also what runs could not save (see `cpr rescue`)"
    )


def _clean(options: argparse.Namespace) -> int:
    runs = occupied()
    freed = 0
    for run in runs:
        what = f"{run.folder}: {size_text(run.num_bytes)} in {count_text(run.num_segments, 'segment')}"
        if run.in_use_by:
            print(f"{what}, in use by {run.in_use_by}")
        elif options.yes and free(run.folder, in_doubt=True, unsaved=options.unsaved):
            print(f"{what}, removed")
            freed += run.num_bytes
        elif run.is_unsaved:
            print(f"{what}, not saved: `cpr rescue {run.folder.name} --out DIR` saves it")
        else:
            print(f"{what}, left over{f' {run.doubt}' if run.doubt else ''}")
    if options.yes:
        print(f"{size_text(freed)} of shared memory freed")
    elif any(not run.in_use_by for run in runs):
        also = "; with --unsaved also what was not saved" if any(run.is_unsaved for run in runs) else ""
        print(f"to remove what is left over: cpr clean --yes{also}")
    elif not runs:
        print(f"no run of this user has shared memory in {user_folder().parent}")
    return FINE


def _add_rescue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="its folder's name, as `cpr clean` lists it (default: the only one that was not saved)",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="checkpoint directory, a path or a URI: an empty one, or the run's own",
    )


def _rescue(options: argparse.Namespace) -> int:
    folder = _choose(options.name)
    _check_target(options.out)
    # imported late, as only this command reads checkpoints
    from cpr.checkpoint.storage.base import open_storage  # noqa: PLC0415
    from cpr.recovery.rescue import opened, save  # noqa: PLC0415

    storage = open_storage(options.out)
    with opened(folder) as rescued, byte_bar("saving") as bar:
        bar.reset(rescued.num_bytes)
        manifest = save(rescued, storage, bar.update)
    for segment in unsaved_segments(folder):
        (segment / UNSAVED_FILE).unlink(missing_ok=True)
    print(
        f"saved {size_text(manifest.num_bytes)} to {storage.uri} as save {manifest.sequence} at step "
        f"{manifest.step:,}. The memory is no longer needed, and is freed soon"
    )
    return FINE


def _check_target(out: str) -> None:
    """Refuse a folder that is no checkpoint directory, where no resumed run would ever look for the save.

    Raises:
        ValueError: says which directory to give.
    """
    folder = Path(out.removeprefix("file://")).absolute()
    if folder.is_relative_to(user_folder().absolute()):
        raise ValueError(f"{folder} is shared memory, which `cpr clean` frees: give a directory on a disk")
    names = {each.name for each in folder.iterdir()} if "://" not in out and folder.is_dir() else set()
    if names and not names & {"owners", "saves"}:
        advice = f": give {folder / 'checkpoint'}" if "checkpoint" in names else ""
        raise ValueError(f"{folder} is neither empty nor a checkpoint directory{advice}")


def _choose(name: str | None) -> Path:
    """The folder of the run to rescue.

    Raises:
        ValueError: there is no such run, there are several, or it is in use.
    """
    if name is None:
        runs = [run for run in occupied() if run.is_unsaved and not run.in_use_by]
    else:
        runs = [run for run in occupied() if run.folder.name == name]
    if not runs:
        which = "a dead run that was not saved" if name is None else f"a run {name}"
        raise ValueError(f"{user_folder()} holds no memory of {which}; `cpr clean` lists what is there")
    if runs[0].in_use_by:
        raise ValueError(f"{runs[0].folder} is in use by {runs[0].in_use_by}: stop that first")
    if len(runs) > 1:
        names = ", ".join(run.folder.name for run in runs)
        raise ValueError(f"there is memory of several runs: say which one of {names}")
    return runs[0].folder


CLEAN: Final = Command(
    name="clean",
    help="List what runs of this user hold in shared memory on this machine; remove what dead ones left.",
    add_arguments=_add_clean,
    run=_clean,
)

RESCUE: Final = Command(
    name="rescue",
    help="Save what a dead run that could not save has left in this machine's memory.",
    add_arguments=_add_rescue,
    run=_rescue,
)
