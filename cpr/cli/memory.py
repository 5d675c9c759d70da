"""Commands around the shared memory in which tables outlive their workers."""

import argparse
from typing import Final

from cpr.cli.command import FINE, Command
from cpr.humanize import count_text, size_text
from cpr.launch import launch
from cpr.resident.cleanup import free, occupied
from cpr.resident.folders import user_folder


def _add_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="remove what nobody needs (default: only list)")
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


RUN: Final = Command(
    name="run",
    help="Run torchrun, and start it again when it is killed: cpr run -- torchrun ...",
    add_arguments=launch.add_arguments,
    run=launch.run_command,
)

CLEAN: Final = Command(
    name="clean",
    help="List what runs of this user hold in shared memory on this machine; remove what dead ones left.",
    add_arguments=_add_clean,
    run=_clean,
)
