r"""Makes a data set of Parquet files that are fit already, by writing its manifest; no file is changed.

    python -m data.index /data/clicks --guess > schema.toml
    python -m data.index /data/clicks --schema schema.toml
    python -m data.index /data/today --schema schema.toml --no-labels

Run it again after files have changed: it reads all of them again and replaces the manifest. Exit codes: 0
success; 1 a file cannot be read; 2 an error of the user (flags, schema, files that are not fit, permissions).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from data.index.job import Indexed, columns_of, index
from data.index.schema import IndexSchema, guess
from data.jobs.display import count_text
from data.jobs.folder import FOR_THE_USER

DAYS_SHOWN: Final = 10


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m data.index", description="Parquet files that are fit already to a data set."
    )
    made.add_argument(
        "folder", metavar="DIR", help="folder of the files, or a URI such as s3://BUCKET/FOLDER"
    )
    made.add_argument(
        "--schema", type=Path, metavar="FILE", help="TOML file that says which columns are what"
    )
    unlabelled = "the files have no label column; for dlrm.predict"
    made.add_argument("--no-labels", action="store_true", help=unlabelled)
    made.add_argument(
        "--guess", action="store_true", help="print a schema to start from, and do nothing else"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    flags = parser().parse_args(arguments)
    try:
        if flags.guess == bool(flags.schema) or (flags.guess and flags.no_labels):
            raise ValueError("give --schema FILE, or --guess to print one to start from")
        if flags.guess:
            print(guess(columns_of(flags.folder)), end="")
        else:
            schema = IndexSchema.from_toml(flags.schema)
            made = index(flags.folder, schema, _show_progress, labels=not flags.no_labels)
            print(describe(flags.folder, made), end="")
    except (ValueError, PermissionError) as error:
        print(f"data.index: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"data.index: {error}", file=sys.stderr)
        return 2 if error.errno in FOR_THE_USER else 1
    except KeyboardInterrupt:
        print("data.index: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def describe(uri: str, made: Indexed) -> str:
    """Describe an index for people: its size, its days and its tables."""
    manifest = made.manifest
    days = ", ".join(map(str, manifest.days[:DAYS_SHOWN])) + ", ..." * (len(manifest.days) > DAYS_SHOWN)
    size = (
        f"{count_text(manifest.num_rows, 'row')} in {count_text(len(manifest.parts), 'file')} on day {days}"
    )
    clicks = "no labels, for `python -m dlrm.predict`"
    if made.num_clicks is not None:
        clicks = f"{made.num_clicks / manifest.num_rows:.1%} with label 1"
    lines = [f"{uri}: {size}, {clicks}; {count_text(len(manifest.dense), 'dense column')}"]
    for feature in manifest.features:
        rows = count_text(feature.rows, "row") if feature.rows else "raw ids"
        weights = f", weights {feature.weights}" if feature.weights else ""
        lines.append(
            f"  {feature.name}: {rows}, {made.ids_per_sample[feature.name]:.3g} ids a sample{weights}"
        )
    if len(manifest.days) == 1 and made.num_clicks is not None:
        lines.append(
            "There is one day, and training keeps the last one for the test: put test rows into a file or a "
            "folder day=N of their own, or set data.train_days to it, to train and test on the same rows"
        )
    return "\n".join(lines) + "\n"


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rread {done} of {total} files", end="\n" if done == total else "", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
