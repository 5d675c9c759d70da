r"""Make a prepared data set from raw Criteo click logs, or check one.

    python -m data.prepare train.txt --out data/kaggle --table-rows kaggle
    python -m data.prepare day_*.gz --out data/terabyte --ids modulo --processes 16
    python -m data.prepare --verify data/kaggle

Killed at any moment and started again, it goes on where it was. Exit codes: 0 done; 1 a process
died, or `--verify` found damage; 2 something for you to change (flags, input, folder, disk space).
"""

import argparse
import errno
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from data.criteo import TERABYTE_CAP
from data.prepare.config import ID_RULES, PrepareConfig, parse_bytes
from data.prepare.inputs import DEFAULT_DAYS
from data.prepare.job import prepare
from data.prepare.pool import WorkerDiedError
from data.prepare.verify import verify

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = {field.name: field.default for field in fields(PrepareConfig)}
    made = argparse.ArgumentParser(
        prog="python -m data.prepare", description="Raw Criteo click logs to a prepared data set."
    )
    add = made.add_argument
    add("raw", nargs="*", type=Path, metavar="RAW", help="raw files: plain, .gz or .zst")
    add("--out", type=Path, metavar="DIR", help="folder of the data set")
    add("--verify", type=Path, metavar="DIR", help="check every digest and row count of a finished data set")
    add("--ids", default=defaults["ids"], help=f"{', '.join(ID_RULES)} (default %(default)s)")
    add(
        "--table-rows",
        default=defaults["table_rows"],
        help="modulo, hash: terabyte, kaggle, one number, or 26 with commas (default %(default)s)",
    )
    add("--cap", type=int, default=TERABYTE_CAP, help="rows a table may have at most (default %(default)s)")
    add("--min-count", type=int, default=defaults["min_count"], help="vocabulary: rarer values share an id")
    add("--days", type=int, help=f"equal parts to cut a single unnamed file into (default {DEFAULT_DAYS})")
    add("--processes", type=int, help="worker processes (default: one a core, as memory allows)")
    add("--memory", default="2G", help="memory of all processes together (default %(default)s)")
    add(
        "--max-bad-ratio",
        type=float,
        default=defaults["max_bad_ratio"],
        help="share of bad lines beyond which the job fails (default %(default)s)",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    flags = parser().parse_args(arguments)
    try:
        return _verify(flags.verify) if flags.verify else _prepare(flags)
    except ValueError as error:
        print(f"data.prepare: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"data.prepare: {_explain(error)}", file=sys.stderr)
        return 2 if error.errno in _FULL_DISK else 1
    except WorkerDiedError as error:
        print(f"data.prepare: {error}. Start the same command again to go on.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("data.prepare: stopped. Start the same command again to go on.", file=sys.stderr)
        return 130


def _prepare(flags: argparse.Namespace) -> int:
    if flags.out is None:
        raise ValueError("say where to write with --out DIR")
    config = PrepareConfig(
        raw=tuple(flags.raw),
        out=flags.out,
        ids=flags.ids,
        table_rows=flags.table_rows,
        cap=flags.cap,
        min_count=flags.min_count,
        num_days=flags.days,
        num_processes=flags.processes,
        memory_bytes=parse_bytes(flags.memory),
        max_bad_ratio=flags.max_bad_ratio,
    )
    manifest = prepare(config)
    num_bad = sum(manifest.provenance["rejects"]["num_rejects"].values())
    size = f"{manifest.num_rows:,} rows on {len(manifest.days)} days in {len(manifest.parts)} files"
    print(f"{flags.out}: {size}; {num_bad:,} bad lines")
    return 0


def _verify(out: Path) -> int:
    try:
        problems = verify(out)
    except ValueError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem)
    print(
        f"{out}: " + ("all digests and row counts are right" if not problems else f"{len(problems)} problems")
    )
    return 1 if problems else 0


def _explain(error: OSError) -> str:
    if error.errno in _FULL_DISK:
        return (
            f"there is no room to write ({error}). Free some and start the same command again: "
            "finished pieces are kept"
        )
    return f"{error}. Start the same command again to go on."


if __name__ == "__main__":
    sys.exit(main())
