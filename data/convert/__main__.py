r"""Makes a data set from CSV, TSV, JSON lines or Parquet files, by a schema file.

    python -m data.convert --guess ratings.csv -o schema.toml
    python -m data.convert schema.toml ratings.csv --out data/ratings
    python -m data.convert --like data/ratings new.csv --out data/new
    python -m data.convert --like data/ratings --no-labels today.csv --out data/today
    python -m data.convert --verify data/ratings

The same command continues a job that was killed at any moment. Exit codes: 0 success; 1 a process died, or
`--verify` found damage; 2 an error of the user (schema, input, folder, permissions, disk space).
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path

from data.convert.config import ConvertConfig
from data.convert.guess import guess
from data.convert.job import bad_rows, convert
from data.convert.like import schema_like
from data.jobs.command import add_job_flags, parse_bytes, print_verified, run_command
from data.jobs.display import count_text
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.jobs.rejects import REJECTS_NAME
from data.schema import Schema


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m data.convert", description="Tables of any columns to a data set."
    )
    add = made.add_argument
    add("schema", nargs="?", metavar="SCHEMA.toml", help="what the columns are (not with --like)")
    add(
        "files",
        nargs="*",
        type=Location.of,
        metavar="FILE",
        help=".csv, .tsv, .jsonl (also .gz, .zst) or .parquet",
    )
    add(
        "--out",
        "-o",
        type=Location.of,
        metavar="DIR",
        help="folder of the data set; --guess: the schema file",
    )
    like = "data set of data.convert whose schema, vocabularies, means and deviations are taken"
    add("--like", type=Location.of, metavar="DATASET", help=like)
    unlabelled = "rows have no labels yet: read no label, [time] or [split]; for dlrm.predict"
    add("--no-labels", action="store_true", help=unlabelled)
    add("--guess", type=Location.of, metavar="FILE", help="write a schema to start from; takes only -o")
    add_job_flags(made, "rows", ConvertConfig.max_bad_ratio)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    flags = parser().parse_intermixed_args(arguments)
    return run_command("data.convert", lambda: _run(flags))


def _run(flags: argparse.Namespace) -> int:
    if not flags.verify and not flags.guess:
        return _convert(flags)
    allowed = {"verify"} if flags.verify else {"guess", "out"}
    given = {name for name, value in vars(flags).items() if value != parser().get_default(name)}
    if given - {"files"} - allowed or flags.files:
        raise ValueError("--guess FILE (with -o) and --verify DIR take nothing else")
    return print_verified(flags.verify) if flags.verify else _guess(flags.guess, flags.out)


def _convert(flags: argparse.Namespace) -> int:
    if flags.schema is None and flags.like is None:
        raise ValueError("name a schema file and the files of the table; --guess FILE writes a schema")
    if flags.out is None:
        raise ValueError("name the output folder with --out DIR")
    files = flags.files
    if flags.like is not None and flags.schema is not None:  # the first of the files
        files = [Location.of(flags.schema), *files]
    schema = schema_like(flags.like) if flags.like else Schema.from_toml(Path(flags.schema))
    config = ConvertConfig(
        schema=schema.without_labels() if flags.no_labels else schema,
        files=tuple(files),
        like=flags.like,
        out=flags.out,
        num_processes=flags.num_processes,
        cluster=flags.cluster,
        memory_bytes=parse_bytes(flags.memory),
        max_bad_ratio=flags.max_bad_ratio,
    )
    manifest = convert(config)
    counts = (manifest.num_rows, "row"), (len(manifest.days), "day"), (len(manifest.parts), "file")
    size = "{} on {} in {}".format(*starmap(count_text, counts))
    rejects = bad_rows(manifest)
    print(f"{flags.out}: {size}; {count_text(rejects.total(), 'bad row')}")
    for reason, count in rejects.most_common():
        print(f"  {count:,}: {reason} ({flags.out / REJECTS_NAME})")
    for feature in manifest.features:
        print(f"  {feature.name}: {count_text(feature.rows, 'table row') if feature.rows else 'raw ids'}")
    if not config.schema.has_labels:
        why = f", as {flags.like} has none" if flags.like and not flags.no_labels else ""
        print(f"no labels{why}: for `python -m dlrm.predict`, not for training")
    elif len(manifest.days) == 1:
        print("all rows are of one day: without a day for the test, give the schema a [split]")
    return 0


def _guess(path: Location, out: Location | None) -> int:
    text = guess(path)
    if out is None:
        print(text, end="")
        return 0
    if out.size() is not None:
        raise ValueError(f"{out} exists; remove it, or name another file with -o")
    with durable_file(out) as sink:
        sink.write(text.encode())
    print(f"wrote {out}: read it, correct what was guessed wrong, and convert with it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
