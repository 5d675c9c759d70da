"""The commands `cpr describe`, `verify`, `export` and `import`, for checkpoint directories.

Each command imports the modules that it needs when it runs, so that `cpr run` and `cpr clean` start fast.
"""

# ruff: noqa: PLC0415

import argparse
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cpr.cli.command import BAD, FINE, Command, byte_bar, open_directory
from cpr.humanize import count_text, size_text

if TYPE_CHECKING:
    from cpr.checkpoint.catalog.chain import Rejected, State


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="checkpoint directory, a path or a URI such as s3://b/run, or the folder of a run of dlrm.train",
    )


def _add_describe(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument("--json", action="store_true", help="everything, for machines")


def _describe(options: argparse.Namespace) -> int:
    from cpr.checkpoint.catalog.describe import describe
    from cpr.checkpoint.catalog.describe_text import as_text

    storage = open_directory(options.directory)
    about = describe(storage, datetime.now(UTC))
    if about is None:
        raise ValueError(f"{storage.uri} holds no checkpoint: name a directory in which a run has saved")
    print(json.dumps(about.to_json(), indent=1) if options.json else as_text(about))
    return FINE


def _verify(options: argparse.Namespace) -> int:
    from cpr.checkpoint.catalog.verify import verify

    storage = open_directory(options.directory)
    with byte_bar("verifying") as bar:
        result = verify(storage, bar.update, bar.reset)
    _print_rejected(result.rejected)
    if not result.states and all(save.unfinished for save in result.rejected):
        raise ValueError(f"{storage.uri} holds no checkpoint: name a directory in which a run has saved")
    for cause in (*(file.cause for file in result.bad), *result.damaged_owners):
        print(f"bad: {cause}")
    verdict = f"{len(result.bad)} of them bad" if result.bad else "all as they were saved"
    print(f"{count_text(result.num_files, 'file')}, {size_text(result.num_bytes)}: {verdict}")
    newest = result.newest
    print(f"newest state that verifies: {_state_text(newest)}" if newest else "no state verifies")
    return FINE if result.is_fine else BAD


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=("dcp", "safetensors", "parquet"),
        help="torch.distributed.checkpoint; safetensors files with an index; or a folder of Parquet a table",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="OUT", help="folder to make; may be empty")
    parser.add_argument(
        "--since",
        type=int,
        metavar="STEP",
        help="only what has changed since the state of this step (--to parquet): rows, and ids to delete",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the state of step N (default: the newest that verifies)",
    )
    choice.add_argument("--sequence", type=int, metavar="N", help="the state of save N")


def _export(options: argparse.Namespace) -> int:
    from cpr.checkpoint.interop.export import export

    with byte_bar("exporting") as bar:
        done = export(
            open_directory(options.directory),
            options.to,
            options.out,
            sequence=options.sequence,
            step=options.step,
            since=options.since,
            progress=bar.update,
            start=bar.reset,
        )
    _print_rejected(done.rejected)
    if done.increment is None:
        print(f"exported {_state_text(done.state)} to {options.out}")
    else:
        num_rows = sum(table.rows for table in done.increment.values())
        num_gone = sum(table.tombstones for table in done.increment.values())
        print(
            f"exported what has changed since step {options.since:,} until {_state_text(done.state)} to "
            f"{options.out}: {count_text(num_rows, 'row')}, {count_text(num_gone, 'tombstone')}"
        )
    if options.to == "parquet":
        print("dense parameters and other state are not in it: Parquet takes tables alone")
    return FINE


IMPORT_LINES: Final = """\
state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
torch.distributed.checkpoint.load(state, checkpoint_id="DCP_DIR")
checkpointer.save("consistent")
checkpointer.wait()
"""
"""Python lines that load a directory of `torch.distributed.checkpoint` into a TorchRec model and save it."""


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", help=argparse.SUPPRESS)
    for flag in ("--out", "--tables", "--step"):  # accepted so that old command lines get the refusal
        parser.add_argument(flag, help=argparse.SUPPRESS)


def _import(_: argparse.Namespace) -> int:
    raise ValueError(
        "`cpr import` was removed, because torch.distributed.checkpoint itself loads into a sharded model. "
        "What to do: build the model and its Checkpointer as for training, with tables split by columns as "
        "they were, and run, with the keys that the directory has,\n\n" + IMPORT_LINES
    )


def _print_rejected(rejected: "Iterable[Rejected]") -> None:
    for save in rejected:
        print(f"{'unfinished' if save.unfinished else 'bad'}: {save.reason}")


def _state_text(state: "State") -> str:
    upon = (
        f" (base {state.saves[0].sequence} and {count_text(len(state.saves) - 1, 'row save')})"
        if len(state.saves) > 1
        else ""
    )
    return f"save {state.sequence} at step {state.step:,}{upon}"


DESCRIBE: Final = Command(
    name="describe", help="Show what is in a directory.", add_arguments=_add_describe, run=_describe
)

VERIFY: Final = Command(
    name="verify",
    help="Compare every file with its digest; exit code 1 if one is bad.",
    add_arguments=_add_directory,
    run=_verify,
)

EXPORT: Final = Command(
    name="export",
    help="Write one state as a whole model that other programs read, or what has changed since another. "
    "Takes some hundred MB of memory, however large the tables are.",
    add_arguments=_add_export,
    run=_export,
)

IMPORT: Final = Command(
    name="import",
    help="Removed: shows the lines of Python that load torch.distributed.checkpoint instead.",
    add_arguments=_add_import,
    run=_import,
)
