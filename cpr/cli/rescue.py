"""`cpr rescue`: saves what a dead run has left in memory."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Final

from cpr.cli.command import FINE, Command
from cpr.cli.progress_bar import Bar
from cpr.humanize import size_text
from cpr.resident.cleanup import occupied
from cpr.resident.folders import UNSAVED_FILE, unsaved_segments, user_folder


def _add_rescue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="its folder's name, as `cpr clean` lists it (default: the only one there is)",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="checkpoint directory, a path or a URI: an empty one, or the run's own",
    )


def _rescue(options: argparse.Namespace) -> int:
    folder = _choose(options.name)
    from cpr.checkpoint.storage.base import open_storage  # noqa: PLC0415
    from cpr.recovery.rescue import opened, save  # noqa: PLC0415

    storage = open_storage(options.out)
    with opened(folder) as rescued, closing(Bar("saving")) as bar:
        bar.start(rescued.num_bytes)
        manifest = save(rescued, storage, bar.advance)
    for segment in unsaved_segments(folder):
        (segment / UNSAVED_FILE).unlink(missing_ok=True)
    print(
        f"saved {size_text(manifest.num_bytes)} to {storage.uri} as save {manifest.sequence} at step "
        f"{manifest.step:,}. The memory is no longer needed: cpr clean --yes frees it"
    )
    return FINE


def _choose(name: str | None) -> Path:
    """The folder of the run that is meant.

    Raises:
        ValueError: there is none, there are several, or it is in use.
    """
    runs = [run for run in occupied() if name in {None, run.folder.name}]
    dead = [run for run in runs if not run.in_use_by]
    if not runs or (not dead and name is None):
        which = "a run that is over" if name is None else f"a run {name}"
        raise ValueError(f"{user_folder()} holds no memory of {which}; `cpr clean` lists what is there")
    if not dead:
        raise ValueError(f"{runs[0].folder} is in use by {runs[0].in_use_by}: stop that first")
    unsaved = [run for run in dead if run.is_unsaved]
    chosen = unsaved if len(unsaved) == 1 else dead
    if len(chosen) > 1:
        names = ", ".join(run.folder.name for run in chosen)
        raise ValueError(f"there is memory of several runs: say which one of {names}")
    return chosen[0].folder


RESCUE: Final = Command(
    name="rescue",
    help="Save what a dead run that could not save has left in this machine's memory.",
    add_arguments=_add_rescue,
    run=_rescue,
)
