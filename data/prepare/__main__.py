r"""Makes a prepared data set from raw Criteo click logs, or checks one.

    python -m data.prepare train.txt --out data/kaggle --ids vocabulary
    python -m data.prepare day_*.gz --out data/terabyte --ids modulo --processes 16
    python -m data.prepare --verify data/kaggle

The same command continues a job that was killed at any moment. Exit codes: 0 success; 1 a process died, or
`--verify` found damage; 2 an error of the user (flags, input, folder, permissions, disk space).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, starmap

from data.criteo import CATEGORY_NAMES, TERABYTE_CAP
from data.jobs.command import add_job_flags, parse_bytes, print_verified, run_command
from data.jobs.display import count_text
from data.jobs.location import Location
from data.jobs.rejects import REJECTS_NAME
from data.prepare.config import DEFAULT_MIN_COUNT, ID_RULES, PrepareConfig
from data.prepare.job import prepare
from data.prepare.parse.inputs import DEFAULT_DAYS
from data.prepare.parse.lines import TRAILING_BYTES
from data.prepare.tables import PUBLISHED, ROOMY_ROWS, shared_values

_REPORTED_SHARE = 0.01
_GAPS_SHOWN = 10


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m data.prepare", description="Raw Criteo click logs to a prepared data set."
    )
    add = made.add_argument
    add(
        "raw",
        nargs="*",
        type=Location.of,
        metavar="RAW",
        help="raw files: plain, gzip or zstd, whatever their names",
    )
    add("--out", type=Location.of, metavar="DIR", help="folder of the data set")
    add("--ids", default=PrepareConfig.ids, help=f"{', '.join(ID_RULES)} (default %(default)s)")
    add(
        "--table-rows",
        help="modulo, hash: terabyte, kaggle, one number, or 26 with commas (default: terabyte for files "
        f"named day_N, kaggle for a single other file, each table with {ROOMY_ROWS:,} at least)",
    )
    add("--cap", type=int, help=f"rows a table may have at most (default {TERABYTE_CAP})")
    add("--min-count", type=int, help=f"vocabulary: rarer values share an id (default {DEFAULT_MIN_COUNT})")
    days = f"equal parts to cut a single unnamed file into (default {DEFAULT_DAYS})"
    add("--days", type=int, dest="num_days", metavar="DAYS", help=days)
    add_job_flags(made, "lines", PrepareConfig.max_bad_ratio)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    flags = parser().parse_args(arguments)
    return run_command("data.prepare", lambda: _verify(flags) if flags.verify else _prepare(flags))


def _prepare(flags: argparse.Namespace) -> int:
    if flags.out is None:
        raise ValueError("name the output folder with --out DIR")
    given = dict(vars(flags))
    del given["verify"]
    memory_bytes = parse_bytes(given.pop("memory"))
    config = PrepareConfig(**{**given, "raw": tuple(flags.raw), "memory_bytes": memory_bytes})
    manifest = prepare(config)
    rejects = Counter[str](manifest.provenance["rejects"]["num_rejects"])
    num_trailing = rejects.pop(TRAILING_BYTES, 0)
    counts = (manifest.num_rows, "row"), (len(manifest.days), "day"), (len(manifest.parts), "file")
    size = "{} on {} in {}".format(*starmap(count_text, counts))
    print(f"{flags.out}: {size}; {count_text(rejects.total(), 'bad line')}")
    if num_trailing:
        print(
            f"{num_trailing} of the raw files hold bytes after the end of their compressed data. All lines "
            f"before them are kept; {flags.out / REJECTS_NAME} names the files"
        )
    print(_describe_gaps(manifest.days), end="")
    print(_describe_sharing(config), end="")
    return 0


def _describe_gaps(days: Sequence[int]) -> str:
    """A line about missing days between others; empty if there are none."""
    gaps = [(before + 1, after - 1) for before, after in pairwise(sorted(days)) if after - before > 1]
    if not gaps:
        return ""
    ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last in gaps]
    more = ", ..." if len(ranges) > _GAPS_SHOWN else ""
    return (
        f"there is nothing of day {', '.join(ranges[:_GAPS_SHOWN])}{more}, but of earlier and of later ones. "
        "If that is a mistake, give all files, and another --out\n"
    )


def _describe_sharing(config: PrepareConfig) -> str:
    """A line about values that share a row; empty if that is unknown."""
    if config.published is None:
        return ""
    shares = {
        name: shared_values(num_values, rows)
        for name, num_values, rows in zip(
            CATEGORY_NAMES, PUBLISHED[config.published], config.static_table_rows, strict=True
        )
    }
    shown = [f"{name} {share:.0%}" for name, share in shares.items() if share >= _REPORTED_SHARE]
    return (
        f"--ids {config.ids} merges values by chance. If this is all of Criteo {config.published.title()}, "
        f"these shares of a table's values share a row: {', '.join(shown)}, of others under 1%. "
        "--ids vocabulary keeps values apart, in two passes\n"
    )


def _verify(flags: argparse.Namespace) -> int:
    out: Location = flags.verify
    if vars(flags) != vars(parser().parse_args(["--verify", out.root])):
        raise ValueError("--verify only reads a finished data set; leave out raw files and other flags")
    return print_verified(out)


if __name__ == "__main__":
    sys.exit(main())
