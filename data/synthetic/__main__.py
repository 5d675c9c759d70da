"""`python -m data.synthetic --out DIR`: make a data set and print the best AUC that any model can reach."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from data.synthetic.build import generate, is_finished
from data.synthetic.config import CARDINALITIES, COMPRESSIONS, FORMATS, SyntheticConfig


def parse(arguments: Sequence[str] | None = None) -> tuple[SyntheticConfig, str, int]:
    """Configuration, output folder and number of processes from the command line."""
    usual = SyntheticConfig()
    parser = argparse.ArgumentParser(
        prog="python -m data.synthetic",
        description="Make Criteo-like click logs whose labels come from a planted teacher.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, help="folder of the data set; made if absent, completed if unfinished")
    add("--preset", choices=CARDINALITIES, default=usual.preset, help="whose table sizes")
    add("--scale", type=float, default=usual.scale, help="factor on the large tables' sizes, at most 1")
    add("--days", type=int, default=usual.days, help="number of days")
    add("--rows-per-day", type=int, default=usual.rows_per_day, help="samples a day")
    add("--seed", type=int, default=usual.seed, help="decides the teacher and every sample")
    add("--drift", type=float, default=usual.drift, help="how far the world moves a day, 0 to 1")
    add("--multi-hot", action="store_true", help="bags of ids, of MLPerf DCNv2's sizes (Parquet only)")
    add("--format", choices=FORMATS, default=usual.format, help="Parquet, or Criteo's raw lines")
    add("--compression", choices=COMPRESSIONS, default=usual.compression, help="of raw files")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="worker processes")
    options = vars(parser.parse_args(arguments))
    out, processes = options.pop("out"), options.pop("processes")
    try:
        config = SyntheticConfig(**options)
        if processes < 1:
            raise ValueError(f"processes is {processes}; choose at least 1")
    except ValueError as error:
        parser.error(str(error))
    return config, out, processes


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the data set; returns the exit status."""
    config, out, processes = parse(arguments)
    try:
        there = is_finished(config, out)
        provenance = generate(config, out, processes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    print(f"{out} was already there, complete" if there else f"made {out}", end=": ")
    print(f"{config.days} days x {config.rows_per_day:,} rows, {sum(config.table_rows):,} table rows")
    for day, figures in provenance["days"].items():
        print(f"day {day}: {_describe(figures)}")
    print(f"all: {_describe(provenance)}")
    return 0


def _describe(figures: Mapping[str, float]) -> str:
    return (
        f"best reachable AUC {figures['best_auc']:.4f} (expected {figures['best_auc_expected']:.4f}), "
        f"best log loss {figures['best_log_loss']:.4f}, click rate {figures['click_rate']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
